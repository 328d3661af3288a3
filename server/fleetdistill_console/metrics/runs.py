"""Figures of runs, read from the store at a scrape.

Only the newest runs have figures of their own, so that a store with years of runs makes no more time series than a
graph can show: the runs that have not ended, and the newest that have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from fleetdistill.errors import FleetDistillError
from fleetdistill_console.metrics import catalogue
from fleetdistill_console.metrics.catalogue import Samples
from fleetdistill_server.event_kinds import SECURE_SUM, SECURE_SUM_FAILED
from fleetdistill_server.figures import SumFigures
from fleetdistill_server.logs import Interruption
from fleetdistill_server.service.served import placed, state_of
from fleetdistill_server.store.run_figures import RoundFigures, RunFigures, run_counts, run_figures
from fleetdistill_server.store.states import IDLE, QUEUED, WAITING, RunStatus
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.metrics")
MAX_RUNS = 50
"""Runs with figures of their own."""
KEPT_SECONDS = 2.0
"""Time for which a reading answers further scrapes."""
_PATIENCE_SECONDS = 3.0
FAILED = "failed"
"""The state of a run that was stopped because its engine failed; one that an operator stopped is `stopped`."""
STATES = (*RunStatus, FAILED, QUEUED, WAITING, IDLE)
"""States of a run, which the label `status` has."""
_BY_NAME = {"accuracy": catalogue.ACCURACY, "loss": catalogue.LOSS}
_SPLITS = ("train", "test")
_OUTCOMES = {SECURE_SUM: "made", SECURE_SUM_FAILED: "failed"}
SUM_STATES = ("asked", "keys", "boxes", "inputs", "signatures", "shares", "min_devices", "threshold")
"""Numbers of a secure sum's devices, which the label `state` has."""


class RunsCollector:
    """Reads the figures of runs from the store in a directory.

    Args:
        store: The store's directory.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, store: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = store
        self._clock = clock
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._read: tuple[float, list[Metric]] | None = None
        self._away = Interruption(logger, "the metrics lack the runs: %s", "the metrics have the runs again")

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics; only `fleetdistill_store_up` while the store cannot be read."""
        with self._lock:
            if self._read is None or self._clock() - self._read[0] >= KEPT_SECONDS:
                self._read = self._clock(), self._look()
            return self._read[1]

    def close(self) -> None:
        """Closes the connection to the store."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _look(self) -> list[Metric]:
        samples = Samples()
        try:
            result, counts, states = self._figures()
            backup = self._last_backup()
        except FleetDistillError as error:
            self._away.fail(error)
            return Samples().add(catalogue.STORE_UP, 0).metrics()
        self._away.work()
        samples.add(catalogue.STORE_UP, 1)
        if backup is not None:
            samples.add(catalogue.BACKUP, backup)
        for state in sorted({*STATES, *counts}):
            samples.add(catalogue.RUNS, counts.get(state, 0), state)
        for item in result:
            _add(samples, item, states.get(item.name, item.status))
        return samples.metrics()

    def _last_backup(self) -> float | None:
        assert self._store is not None
        return self._store.operator_calls.last_backup()

    def _figures(self) -> tuple[list[RunFigures], dict[str, int], dict[str, str]]:
        """Returns the figures of the newest runs, the number of runs by state, and the states of some."""
        if self._store is None:
            self._store = Store.open(self._directory, patience_seconds=_PATIENCE_SECONDS)
        store = self._store
        now = placed(self._directory, self._store)
        counts = Counter(run_counts(store.database))
        states = {run.name: FAILED for run in store.run_control.failed()}
        counts[RunStatus.STOPPED] -= len(states)
        counts[FAILED] += len(states)
        for run in store.runs.active():
            states[run.name] = state_of(run, now)
            counts[run.status] -= 1
            counts[states[run.name]] += 1
        return run_figures(store.database, MAX_RUNS), counts, states


def _add(samples: Samples, run: RunFigures, state: str) -> None:
    name = run.name
    settings = run.config.get("run", {})
    samples.add(catalogue.RUN_INFO, 1, name, str(settings.get("method", "")), state)
    samples.add(catalogue.PRESENT, run.present, name)
    for state, count in run.asks.items():
        samples.add(catalogue.ASKS, count, name, state)
    samples.add(catalogue.COMPLETED, run.completed_rounds, name)
    samples.add(catalogue.SHORT, run.short_rounds, name)
    for metric, value in _optional(run, settings):
        if value is not None:
            samples.add(metric, value, name)
    if run.last is not None:
        _add_last_round(samples, name, run.last)
    for kind, outcome in _OUTCOMES.items():
        if run.sums:
            samples.add(catalogue.SUMS, run.sums[kind], name, outcome)
    if run.last_sum is not None:
        _add_last_sum(samples, name, run.last_sum)


def _add_last_round(samples: Samples, run: str, last: RoundFigures) -> None:
    for (figure, split), reported in last.reported.items():
        if figure in _BY_NAME and split in _SPLITS:
            samples.add(_BY_NAME[figure], reported.mean, run, split)
    for figure, value in last.method.items():
        if isinstance(value, int | float):
            samples.add(catalogue.METHOD_FIGURE, value, run, figure)


def _add_last_sum(samples: Samples, run: str, last: SumFigures) -> None:
    for state in SUM_STATES:
        if (devices := getattr(last, state)) is not None:
            samples.add(catalogue.SUM_DEVICES, devices, run, state)
    samples.add(catalogue.SUM_SECONDS, last.seconds, run)


def _optional(run: RunFigures, settings: dict[str, Any]) -> Iterator[tuple[catalogue.Description, float | None]]:
    yield catalogue.WANTED, settings.get("rounds")
    yield catalogue.DEADLINE, settings.get("deadline_seconds")
    yield catalogue.UNFINISHED, run.unfinished_since
    if run.last is not None:
        yield catalogue.LAST_COMPLETED, run.last.round.ended_at
        yield catalogue.ROUND_SECONDS, run.last.round.seconds
        yield catalogue.GLOBAL_ACCURACY, run.last.global_accuracy
