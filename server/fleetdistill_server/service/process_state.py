"""What the supervisor says of the processes that it runs, to metrics, and in a file to whoever reads the store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleetdistill_server.service.heartbeat import BEAT_SECONDS, SUPERVISOR_FILE, beat, clear_heartbeat, silent_since

__all__ = ["ENGINE", "SUPERVISOR", "ProcessState"]

FRONT, ENGINE, SUPERVISOR = "front", "engine", "supervisor"
"""Names of the processes."""
_FILE = "processes.json"
_HANGS = {
    FRONT: "the front hangs: it has sent no heartbeat since {since}, so no device can call; after a minute the "
    "supervisor kills it (process {pid}) and starts another",
    ENGINE: "the engine of run {run!r} hangs: it has sent no heartbeat since {since}",
    SUPERVISOR: "the supervisor hangs (process {pid}): it has sent no heartbeat since {since}, and would start no "
    "front or engine again; end it with `kill -9 {pid}`, and start the server again",
}


@dataclass(frozen=True)
class ProcessState:
    """A process of the server.

    Attributes:
        name: `front`, `engine` or `supervisor`.
        run: The engine's run; empty for the others.
        pid: Process id; None if it does not run.
        restarts: How often it was restarted since the server was started.
        hangs: Time of its last heartbeat if there was none for 10 s; else empty.
        waits: Why a process that does not run is started again later, such as `has failed`, or that one that runs has
            failed repeatedly and made no progress since; else empty. A front with it serves nobody.
    """

    name: str
    run: str
    pid: int | None
    restarts: int
    hangs: str = ""
    waits: str = ""

    @property
    def works(self) -> bool:
        """Whether the process runs, and is not a front that fails again and again."""
        return self.pid is not None and not (self.name == FRONT and self.waits)

    def problems(self) -> list[str]:
        """Returns what is wrong with the process, in sentences."""
        result = []
        if self.name == FRONT and (self.waits or self.pid is None):
            what = self.waits or "does not run"
            text = "so no device can call, or not for long; the supervisor starts it again"
            result.append(f"the front {what}, {text}")
        elif self.waits:
            result.append(f"the engine of run {self.run!r} {self.waits}")
        if self.hangs:
            result.append(_HANGS[self.name].format(run=self.run, pid=self.pid, since=self.hangs))
        return result


class ProcessFile:
    """Writes the processes to a file of the store, and sends the supervisor's heartbeat, every second.

    Writes at once when the processes change.

    Args:
        store: The store's directory.
    """

    def __init__(self, store: Path) -> None:
        self._path, self._beat = store / _FILE, store / SUPERVISOR_FILE
        clear_heartbeat(store, SUPERVISOR_FILE)
        self._written: Sequence[ProcessState] = ()
        self._due = 0.0

    def write(self, processes: Sequence[ProcessState]) -> None:
        """Writes the processes, this one first; call it regularly. On a full disk it only sends the heartbeat."""
        if processes == self._written and time.monotonic() < self._due:
            return
        beat(self._beat)
        rows = [asdict(item) for item in (ProcessState(SUPERVISOR, "", os.getpid(), 0), *processes)]
        temporary = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(rows), encoding="utf-8")
            temporary.replace(self._path)
        self._written, self._due = processes, time.monotonic() + BEAT_SECONDS


def read_processes(store: Path) -> list[ProcessState]:
    """Returns the processes of the server of a store, the supervisor first; call it only while there is a server.

    Takes 3 s if the supervisor seems to hang. Empty before a server has started, or if it is on another machine.
    """
    result = last_processes(store)
    if not (hangs := silent_since(store / SUPERVISOR_FILE)):
        return result
    # What it wrote of the others is old by now, and they may work.
    return [replace(item, hangs=hangs if item.name == SUPERVISOR else "", waits="") for item in result]


def last_processes(store: Path) -> list[ProcessState]:
    """Returns what the supervisor last wrote, without a look at whether it still works."""
    try:
        rows = json.loads((store / _FILE).read_text(encoding="utf-8"))
        return [ProcessState(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return []
