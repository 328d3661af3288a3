"""What is wrong with a running server, in sentences for the command line, the dashboard and health checks."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import SILENT_SECONDS, START_SECONDS, HeartbeatMonitor
from fleetdistill_server.service.process_state import ENGINE, SUPERVISOR, ProcessState, read_processes
from fleetdistill_server.service.serve_lock import last_served, serving
from fleetdistill_server.service.served import queue_of
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.disk_space import bytes_under
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import readable_bytes, shorten, when

_MAX_REASON = 300
_NONE = "no engine works on the store"


def problems(store: Store, directory: Path) -> list[str]:
    """Returns a sentence for each process that hangs or is missing and each disk limit; empty without a server.

    Raises:
        StoreError: The store could not be read, for example because its database is away.
    """
    result = problems_of_processes(directory)
    if serving(directory) is None or (started := last_served(directory)) is None:
        return result
    server = started.server
    result += disk_problems(server, directory)
    if server.tls() is not None:
        from fleetdistill_server.views.certificates import unusable  # imports an optional package

        result += unusable(server)
    return result


def problems_of_processes(directory: Path) -> list[str]:
    """Returns the sentences on processes, as `problems`."""
    if serving(directory) is None:
        return []
    return [text for process in read_processes(directory) for text in process.problems()]


def failed_runs(store: Store) -> list[str]:
    """Returns a sentence for each run that its failing engine stopped, until the run is started again or deleted."""
    text = "run {name!r} stopped after a failure at {at}: {reason}; when it is mended, `fleetdistill runs start {name}`"
    return [
        text.format(name=run.name, at=when(run.at), reason=shorten(run.reason, _MAX_REASON))
        for run in store.run_control.failed()
    ]


def disk_problems(server: ServerSection, directory: Path) -> list[str]:
    """Returns why uploads are refused for want of space, in a sentence; empty if they are not.

    Args:
        server: Settings of the server.
        directory: The store's directory; it need not exist.

    Raises:
        StoreError: The disk cannot be read.
    """
    keep, budget = server.keep_free_bytes, server.disk_budget_bytes
    directory = directory.resolve()
    with disk_errors("measuring free disk space"):
        place = next(item for item in (directory, *directory.parents) if item.exists())
        free = shutil.disk_usage(place).free
    if free < keep:
        text = f"only {readable_bytes(free)} are free at {place}, so uploads are refused: free some space, or lower"
        return [f"{text} [server] keep_free_bytes, which is {readable_bytes(keep)}"]
    if budget and (used := bytes_under(directory)) >= budget:
        text = f"the store has {readable_bytes(used)}, so uploads are refused: run `fleetdistill runs prune RUN`, or"
        return [f"{text} raise [server] disk_budget_bytes, which is {readable_bytes(budget)}"]
    return []


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
        if served_now is None:
            names = self._store.runs.names()
        else:
            names = list(queue_of(served_now, self._store))[: served_now.engines]  # those that have their turn
        self._beats = {
            run: self._beats.get(run) or HeartbeatMonitor(engine_directory(self._directory, run)) for run in names
        }
        bad = {run: beats for run, beats in self._beats.items() if beats.silent_seconds() >= _limit(beats)}
        if served_now is None and any(run not in bad and beats.seen for run, beats in self._beats.items()):
            return []  # someone started it by hand
        here = any(beats.begun for beats in self._beats.values())
        if served_now is None or (self._beats and not here and self._store.database.is_remote):
            return [] if self._store.database.is_listening("engine") else [_NONE]
        processes = [item for item in read_processes(self._directory) if item.name in (ENGINE, SUPERVISOR)]
        listed = [text for process in processes for text in process.problems()]
        # Of an engine that it has started again, the supervisor knows which heartbeat is its own.
        unknown = bad.keys() - {process.run for process in processes}
        return list(dict.fromkeys([*listed, *(_problem(run, bad[run].hangs) for run in bad if run in unknown)]))


def _limit(beats: HeartbeatMonitor) -> float:
    return SILENT_SECONDS if beats.begun else START_SECONDS


def _problem(run: str, hangs: str) -> str:
    if not hangs:
        return f"the engine of run {run!r} has not started within {START_SECONDS:g} s"
    return "; ".join(ProcessState(ENGINE, run, None, 0, hangs=hangs).problems())
