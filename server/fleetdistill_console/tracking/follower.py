"""Follows the runs of a store, and copies what is new to one tracker.

The follower keeps no record of its own of what it has written: it asks the tracker. So a killed process, a lost
connection or a restored store leaves neither gaps nor doubled steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fleetdistill_console.tracking.run_figures import Results, points_since, results_in, settings_of
from fleetdistill_console.tracking.server_model import MODEL_NAME, exported_model
from fleetdistill_console.tracking.tracker import Description, RoundPoint, TrackedRun, Tracker, write_missing
from fleetdistill_server.logs import Seldom
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import OVER, RunStatus
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.tracking")
LOOK_SECONDS = 1.0
_MAX_WAIT_SECONDS = 300.0
_WARN_SECONDS = 3600.0


@dataclass(frozen=True)
class Followed:
    """What is followed.

    Attributes:
        store: Directory of the store.
        run: Name of the run; empty for all runs of the store.
        title: Name shown for the run; empty for the run's name.
        began: For a simulation, Unix time at which it began, which tells it from others of the same settings; 0
            otherwise.
        settings: Settings shown beside those of the run.
        results: Folder of a simulation, with its report.json; empty otherwise.
    """

    store: str
    run: str = ""
    title: str = ""
    began: float = 0.0
    settings: dict[str, str] = field(default_factory=dict)
    results: str = ""


class Follower:
    """Copies the figures of runs to one tracker.

    Args:
        followed: The runs.
        name: The tracker's name in log lines, without a password.
        connect: Opens the tracker; called again after a failure.
    """

    def __init__(self, followed: Followed, name: str, connect: Callable[[], Tracker]) -> None:
        self._followed = followed
        self._name = name
        self._connect = connect
        self._store: Store | None = None
        self._tracker: Tracker | None = None
        self._open: dict[str, TrackedRun] = {}
        self._done: dict[str, tuple[object, ...]] = {}
        self._warning = Seldom(_WARN_SECONDS)
        self._failures = 0

    def follow(self, stopped: threading.Event) -> None:
        """Copies until `stopped` is set, then once more; a failure is logged and repeated later."""
        while not stopped.is_set():
            self.look()
            stopped.wait(min(LOOK_SECONDS * 2**self._failures, _MAX_WAIT_SECONDS))
        self.look()
        self._forget()

    def look(self) -> bool:
        """Copies what is new; returns whether that succeeded."""
        try:
            self._copy()
        except Exception as error:  # whatever fails here must not end the process: the next look repeats it
            self._forget()
            self._failures = min(self._failures + 1, 16)
            if self._warning.is_due():
                logger.warning(
                    "cannot write figures to %s, the run goes on and they are written later: %s", self._name, error
                )
            return False
        if self._failures:
            logger.info("figures are written to %s again", self._name)
            self._failures, self._warning = 0, Seldom(_WARN_SECONDS)
        return True

    def _forget(self) -> None:
        """Closes everything, so that the next look asks the tracker what it has."""
        for run in self._open.values():
            run.close()
        self._open, self._done, self._tracker = {}, {}, None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _copy(self) -> None:
        directory = Path(self._followed.store)
        if self._store is None:
            if not has_store(directory):
                return
            self._store = Store.open(directory)
        for name in [self._followed.run] if self._followed.run else self._store.runs.names():
            run = self._store.runs.get(name)
            if run is None:
                continue
            state = self._state(self._store, run)
            if self._done.get(name) != state:
                self._copy_run(self._store, run)
                self._done[name] = state

    def _state(self, store: Store, run: Run) -> tuple[object, ...]:
        """Returns what changes whenever there is something to copy."""
        report = Path(self._followed.results, "report.json") if self._followed.results else None
        written = report.stat().st_mtime_ns if report is not None and report.exists() else 0
        return run.created_at, run.status, run.reason, store.summaries.last_ended_round(run.name), written

    def _copy_run(self, store: Store, run: Run) -> None:
        tracked = self._run(self._description(run))
        newest = max(tracked.known().get("round/seconds", {0}), default=0)
        # The newest round may have been written in part.
        write_missing(tracked, points_since(store, run.name, newest - 1))
        if self._followed.results:
            self._copy_results(store, run, tracked)
        tracked.end(run.status, run.reason)
        if run.status in OVER and run.completed_rounds:
            self._keep_server_model(store, run, tracked)

    def _run(self, described: Description) -> TrackedRun:
        if self._tracker is None:
            self._tracker = self._connect()
        if described.id not in self._open:
            self._open[described.id] = self._tracker.open(described)
        return self._open[described.id]

    def _description(self, run: Run) -> Description:
        began = self._followed.began or run.created_at
        settings = {**self._followed.settings, **settings_of(run.config)}
        name = f"{run.name} {began:.6f}"
        return Description(_digest(name.encode()), self._followed.title or run.name, began, settings)

    def _copy_results(self, store: Store, run: Run, tracked: TrackedRun) -> None:
        """Copies what a simulation's report adds, its controls as runs below its own."""
        completed = [item.step for item in points_since(store, run.name, 0) if item.values["round/completed"]]
        result = results_in(Path(self._followed.results), completed)
        if result is None:
            return
        write_missing(tracked, result.points)
        for name, points in result.controls.items():
            self._copy_control(self._description(run), name, points, result)
        _keep_new(tracked, "files", result)

    def _copy_control(self, of: Description, name: str, points: list[RoundPoint], found: Results) -> None:
        described = Description(
            _digest(f"{of.id} {name}".encode()),
            f"{of.title}: {name}",
            of.began,
            {**of.settings, "control": name},
            parent=of.id,
        )
        control = self._run(described)
        write_missing(control, points)
        control.end(RunStatus.FINISHED if found.finished else RunStatus.RUNNING, "")

    def _keep_server_model(self, store: Store, run: Run, tracked: TrackedRun) -> None:
        """Stores the server's model of a run that has ended, unless that was done after the same round."""
        ended = str(store.summaries.last_ended_round(run.name))
        if tracked.note("model.round") == ended:
            return
        with exported_model(Path(self._followed.store), run.name) as exported:
            if exported is not None:
                tracked.keep({MODEL_NAME: exported})
        tracked.set_note("model.round", ended)


def _keep_new(run: TrackedRun, note: str, found: Results) -> None:
    """Stores files, unless the same were stored before."""
    if not found.files:
        return
    contents = {name: _digest(path.read_bytes()) for name, path in found.files.items()}
    digest = _digest(json.dumps(contents).encode())
    if run.note(note) != digest:
        run.keep(found.files)
        run.set_note(note, digest)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
