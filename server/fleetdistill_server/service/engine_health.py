"""Whether the engines of a store's server work, as the front reports it to health checks."""

from __future__ import annotations

from pathlib import Path

from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import SILENT_SECONDS, HeartbeatMonitor
from fleetdistill_server.service.process_state import ENGINE, ProcessState, read_processes
from fleetdistill_server.service.serve_lock import Serving, serving
from fleetdistill_server.service.served import queue_of
from fleetdistill_server.store.store import Store

START_SECONDS = 120.0
"""Time for which an engine may start without a heartbeat; importing torch may take long."""
_NONE = "no engine works on the store"


class EngineHealth:
    """Observes the heartbeats of all engines; call `problems` every second.

    Args:
        directory: The store's directory.
        store: The store.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        self._directory = directory
        self._store = store
        self._beats: dict[str, HeartbeatMonitor] = {}

    def problems(self) -> list[str]:
        """Returns what is wrong with the engines of the runs that have their turn, in sentences.

        So does the pause after a failure, and that there is no server or any engine. Engines on another machine have a
        supervisor there, which watches them.

        Raises:
            StoreError: The store could not be read.
        """
        served_now = serving(self._directory)
        names = self._store.runs.names() if served_now is None else self._have_turns(served_now)
        self._beats = {
            run: self._beats.get(run) or HeartbeatMonitor(engine_directory(self._directory, run)) for run in names
        }
        bad = {run: beats for run, beats in self._beats.items() if beats.silent_seconds() >= _limit(beats)}
        if served_now is None and any(run not in bad and beats.seen for run, beats in self._beats.items()):
            return []  # someone started it by hand
        here = any(beats.begun for beats in self._beats.values())
        if served_now is None or (self._beats and not here and self._store.database.is_remote):
            return [] if self._store.database.is_listening("engine") else [_NONE]
        listed = [
            text for process in read_processes(self._directory) if process.name == ENGINE for text in process.problems()
        ]
        return list(dict.fromkeys([*listed, *(_problem(run, beats.hangs) for run, beats in bad.items())]))

    def _have_turns(self, found: Serving) -> list[str]:
        return list(queue_of(found, self._store))[: found.engines]


def _limit(beats: HeartbeatMonitor) -> float:
    return SILENT_SECONDS if beats.begun else START_SECONDS


def _problem(run: str, hangs: str) -> str:
    if not hangs:
        return f"the engine of run {run!r} has not started within {START_SECONDS:g} s"
    return "; ".join(ProcessState(ENGINE, run, None, 0, hangs=hangs).problems())
