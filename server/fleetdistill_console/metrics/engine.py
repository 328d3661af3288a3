"""What an engine measures. Imported only if `[server] metrics` is set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import Gauge

from fleetdistill.progress import redirect
from fleetdistill_console.metrics import catalogue
from fleetdistill_console.metrics.catalogue import Description
from fleetdistill_console.metrics.files import OF_AN_ENGINE, engine_of, keep_values
from fleetdistill_server.phases import PHASES as OF_A_ROUND
from fleetdistill_server.phases import observed_by

PREPARING, WAITING, ROUND = "preparing", "waiting", "round"
PHASES = (PREPARING, WAITING, ROUND, *OF_A_ROUND)
"""What an engine does: it prepares a run, waits for a round, or is in a round, in one of its phases or between them."""
_LOOK_SECONDS = 2.0


class EngineMeter:
    """Keeps the metrics of a run's engine in the store's directory.

    Args:
        store: The store's directory.
        run: Name of the run.

    Raises:
        OSError: There is no space for the files.
    """

    def __init__(self, store: Path, run: str) -> None:
        keep_values(store, engine_of(run), OF_AN_ENGINE)
        self._run = run
        self._phase = ""
        self._phases = {name: _gauge(catalogue.PHASE).labels(run, name) for name in PHASES}
        self._progress = _gauge(catalogue.PROGRESS).labels(run)
        self._memory = _gauge(catalogue.GPU_MEMORY)
        self._set(PREPARING)

    def _set(self, phase: str) -> None:
        """Notes what the engine does from now on; never two phases at once."""
        for name, gauge in self._phases.items():
            if name != phase:
                gauge.set(0)
        self._phases[phase].set(1)
        self._phase = phase
        self._progress.set(0)

    def waits(self) -> None:
        """Notes that the engine waits; outside a round this means that it is prepared."""
        if self._phase == PREPARING:
            self._set(WAITING)

    @contextmanager
    def of_round(self) -> Iterator[None]:
        """Notes that the block is a round, and its phases."""
        self._set(ROUND)
        try:
            with observed_by(self._in_phase):
                yield
        finally:
            self._set(WAITING)

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._set(name)

        def note(kind: str, fraction: float) -> None:
            self._progress.set(fraction)
            receiver(kind, fraction)

        receiver = redirect(note)
        try:
            yield
        finally:
            redirect(receiver)
            self._set(outer)

    def watch_memory(self, measure: Callable[[], Mapping[str, int]]) -> None:
        """Starts a thread that notes the GPU memory by state every two seconds, as long as the process lives."""

        def look() -> None:
            while True:
                for state, size in measure().items():
                    self._memory.labels(self._run, state).set(size)
                time.sleep(_LOOK_SECONDS)

        threading.Thread(target=look, name="gpu-memory", daemon=True).start()


def _gauge(what: Description) -> Gauge:
    return Gauge(what.name, what.help, what.labels, registry=None, multiprocess_mode="livemostrecent")
