"""Connects the training of a run's server half with its store: events, progress and resume points."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fleetdistill.errors import DamagedError, StateError, StoreError
from fleetdistill.progress import report_to
from fleetdistill.state import failpoints
from fleetdistill.state.durable import rename_durably
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill_server.engine.cohort import StoreCohort
from fleetdistill_server.engine.group import Group, Round
from fleetdistill_server.logs import about
from fleetdistill_server.store.blobs import Blobs, disk_errors
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.ranks import ALONE
from fleetdistill_server.training.resume import ResumePoints
from fleetdistill_server.training.trainer import Trainer

logger = logging.getLogger("fleetdistill.server.engine")
_PROGRESS = "round "
"""Beginning of the reason in the run's status while it reports progress."""
INTERVAL_SECONDS = 10.0
"""Minimum time between two reports, in seconds; also before the first one, so that short work reports nothing."""


class TrainingProgress:
    """Receiver of `fleetdistill.progress`.

    Args:
        report: Receives texts such as `training, 40 % done, about 12 min left`.
        now: Monotonic clock in seconds.
    """

    def __init__(self, report: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._phase = ""
        self._first = self._last = 0.0
        self._started = self._reported = now()

    def __call__(self, phase: str, fraction: float) -> None:
        now = self._now()
        if phase != self._phase or fraction < self._last:  # the next training
            self._phase = phase
            self._first = fraction
            self._started = now
            self._reported = now
        self._last = fraction
        if now - self._reported >= INTERVAL_SECONDS and fraction > self._first:
            self._reported = now
            left = (now - self._started) * (1 - fraction) / (fraction - self._first)
            self._report(f"{phase}, {fraction:.0%} done, about {_duration(left)} left".replace("%", " %"))


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


class RoundTraining:
    """The training of one run's server half, round by round.

    Args:
        trainer: The server half's trainer; its events go to the store.
        store: Store that contains the run.
        run: Name of the run.
        checkpoint_seconds: Seconds between two resume points of a training; 0 for none.
        directory: Directory for the file that names the resume point; None for no resume points.
        group: Processes that train together; None for this one alone.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: Store,
        run: str,
        checkpoint_seconds: float,
        directory: Path | None,
        group: Group | None,
    ) -> None:
        trainer.notify = partial(store.history.add_event, run)
        if directory is not None and checkpoint_seconds:
            trainer.points = ResumePoints(ResumeStorage(store.blobs, directory), checkpoint_seconds)
        self._points = trainer.points
        self._trainer = trainer
        self._group = group
        self._store = store
        self._run = run

    @contextmanager
    def of_round(self, cohort: StoreCohort, checkpoint: bytes) -> Iterator[None]:
        """Reports progress in the block; returns when no resume point is being written.

        Args:
            cohort: The round.
            checkpoint: Digest of the state that the round started from.
        """
        if self._points is not None:
            self._points.origin = lambda: [self._run, cohort.round, checkpoint.hex(), sorted(cohort.verified)]
        try:
            with (
                report_to(TrainingProgress(partial(self._show, cohort.round))),
                self._together(cohort, checkpoint),
            ):
                yield
        finally:
            if self._points is not None:
                self._points.wait()

    @contextmanager
    def _together(self, cohort: StoreCohort, checkpoint: bytes) -> Iterator[None]:
        """Makes the other processes run the round too."""
        if self._group is None:
            yield
            return
        versions = dict(cohort.data_versions)
        self._group.send(Round(cohort.round, cohort.completed, cohort.devices, versions, checkpoint))
        cohort.group, self._trainer.ranks = self._group, self._group.ranks
        try:
            yield
        finally:
            cohort.group, self._trainer.ranks = None, ALONE

    def end_round(self) -> None:
        """Deletes the resume point, after the round was closed."""
        if self._points is not None:
            self._points.clear()

    def is_shown(self) -> bool:
        """Returns whether the run's status shows progress."""
        run = self._store.runs.get(self._run)
        return run is not None and run.reason.startswith(_PROGRESS)

    def _show(self, number: int, text: str) -> None:
        logger.info("%s", text, extra=about(run=self._run, round=number))
        self._store.runs.set_status(self._run, RunStatus.RUNNING, f"{_PROGRESS}{number}: {text}")


# --- The newest resume point of a training, as a blob of the store and a file that names it.
#
# No row refers to the blob: sweeps delete it an hour after a crash, and forgetting a device deletes it immediately.

FILE = "training.json"


class ResumeStorage:
    """Implements `fleetdistill_server.training.resume.Storage`.

    Args:
        blobs: Blobs of the store.
        directory: Directory of the file that names the blob.
    """

    def __init__(self, blobs: Blobs, directory: Path) -> None:
        self._blobs = blobs
        self._file = directory / FILE

    def save(self, key: str, state: Any) -> None:
        before = self._named()
        sha256 = self._blobs.put_state(pack_state(state))
        failpoints.hit("engine.training.before-name")
        self._name(key, sha256)
        failpoints.hit("engine.training.after-name")
        if before is not None and before[1] != sha256:
            self._blobs.drop(before[1])

    def load(self, key: str) -> Any | None:
        named = self._named()
        if named is None or named[0] != key:
            return None
        with contextlib.suppress(DamagedError, StateError):
            return unpack_state(self._blobs.get_state(named[1]))
        return None

    def clear(self) -> None:
        named = self._named()
        if named is None:
            return
        with disk_errors(f"deleting {self._file}"):
            self._file.unlink(missing_ok=True)
        self._blobs.drop(named[1])

    def _name(self, key: str, sha256: bytes) -> None:
        written = self._file.with_suffix(".new")
        with disk_errors(f"writing {self._file}"):
            written.write_text(json.dumps({"key": key, "sha256": sha256.hex()}), encoding="utf-8")
            rename_durably(written, self._file)

    def _named(self) -> tuple[str, bytes] | None:
        """Returns key and digest; None if there is no file, or if it is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, StoreError):
            named = json.loads(self._file.read_text(encoding="utf-8"))
            return str(named["key"]), bytes.fromhex(named["sha256"])
        return None
