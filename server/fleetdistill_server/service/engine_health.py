"""Whether the engines of a store's server work, as the front reports it to health checks."""

from __future__ import annotations

from pathlib import Path

from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import SILENT_SECONDS, HeartbeatMonitor
from fleetdistill_server.service.process_state import read_processes
from fleetdistill_server.service.serve_lock import Serving, serving
from fleetdistill_server.service.served import queue_of
from fleetdistill_server.store.store import Store

START_SECONDS = 120.0
"""Time for which an engine may start without a heartbeat; importing torch may take long."""


class EngineHealth:
    """Observes the heartbeats of all engines; call `is_good` every second.

    Args:
        directory: The store's directory.
        store: The store.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        self._directory = directory
        self._store = store
        self._beats: dict[str, HeartbeatMonitor] = {}

    def is_good(self) -> bool:
        """Returns whether the engine of every run that has its turn sends heartbeats, or starts.

        False during the pause after a failure, and without a server or any engine. Engines on another machine have a
        supervisor there, which watches them.

        Raises:
            StoreError: The store could not be read.
        """
        found = serving(self._directory)
        names = self._store.runs.names() if found is None else self._have_turns(found)
        self._beats = {run: self._beats.get(run) or self._observe(run) for run in names}
        good = {run: beats.silent_seconds() < _limit(beats) for run, beats in self._beats.items()}
        if found is None and any(good[run] and beats.seen for run, beats in self._beats.items()):
            return True  # someone started it by hand
        here = any(beats.begun for beats in self._beats.values())
        if found is None or (self._beats and not here and self._store.database.is_remote):
            return self._store.database.is_listening("engine")
        return all(good.values()) and not any(one.waits for one in read_processes(self._directory))

    def _have_turns(self, found: Serving) -> list[str]:
        return [row["name"] for row in queue_of(found, self._store)][: found.engines]

    def _observe(self, run: str) -> HeartbeatMonitor:
        return HeartbeatMonitor(engine_directory(self._directory, run))


def _limit(beats: HeartbeatMonitor) -> float:
    return SILENT_SECONDS if beats.begun else START_SECONDS
