"""An engine's heartbeat: a file in the engine's directory whose modification time the engine updates every second.

A separate thread writes it, because a distillation may occupy the engine for hours without being hung. The heartbeat
therefore proves that the process runs, not that its round progresses: it stops when the process is stopped, frozen or
blocked in the kernel. The heartbeat is a file and not a row, because an engine that waits for devices or for disk space
does not write to the database. Observers measure with their own monotonic clock how long the file has not changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING
from fleetdistill_server.store.store import Store

FILE = "engine.beat"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which the engine is reported as hung."""


def start_heartbeat(directory: Path) -> None:
    """Starts a thread that sends heartbeats until this process exits."""
    path = directory / FILE

    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):  # the disk is full, or the store is being deleted
                path.touch()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def clear_heartbeat(directory: Path) -> None:
    """Deletes the heartbeat file of an earlier engine."""
    with contextlib.suppress(OSError):
        (directory / FILE).unlink(missing_ok=True)


class HeartbeatMonitor:
    """Observes an engine's heartbeat.

    Args:
        directory: The engine's directory.
        clock: A monotonic clock in seconds.

    Attributes:
        seen: Whether a heartbeat has arrived since this object was created.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory / FILE
        self._clock = clock
        self._last, self._looked, self._silent = _time_of(self._path), clock(), 0.0
        self.seen = False

    @property
    def begun(self) -> bool:
        """Whether there is a heartbeat, perhaps an old one; an engine that starts has none yet."""
        return self._last is not None

    def silent_seconds(self) -> float:
        """Returns the seconds since the last heartbeat; call this regularly.

        A gap between two calls counts as at most one heartbeat interval, because the caller may have been suspended.
        """
        now, found = self._clock(), _time_of(self._path)
        self._silent += min(now - self._looked, BEAT_SECONDS)
        self._looked = now
        if found is not None and found != self._last:
            self._last, self._silent, self.seen = found, 0.0, True
        return self._silent


@dataclass(frozen=True)
class Served:
    """The runs that a server works on.

    Attributes:
        runs: Runs that have an engine.
        queued: Runs that wait only for an engine, in order.
        hanging: Runs whose engine hangs.
    """

    runs: frozenset[str] = frozenset()
    queued: tuple[str, ...] = ()
    hanging: frozenset[str] = frozenset()


NOT_SERVED = Served()
"""The state of a store that no server is serving."""


def served(directory: Path, store: Store) -> Served:
    """Returns what a store's server works on; takes 3 s if engines seem to hang."""
    found = placed(directory, store)
    return replace(found, hanging=_hanging(directory, sorted(found.runs)))


def placed(directory: Path, store: Store) -> Served:
    """Returns which runs have engines and which are queued, without a look at the engines."""
    found = serving(directory)
    if found is None:
        return NOT_SERVED
    queue = [row for row in store.led.queue() if found.includes(row["name"])]
    if found.run:  # also if an earlier version registered it
        queue = [{"name": found.run, "waits_for": None}]
    later = queue[found.engines :]
    queued = tuple(row["name"] for row in later if row["waits_for"] is None)
    return Served(frozenset(row["name"] for row in queue[: found.engines]), queued)


def state_of(row: Row, served: Served) -> str:
    """Returns the state that people are shown of a run: its status, or what an active one waits for.

    Args:
        row: The run's name, status and `waits_for`.
        served: What its server works on.
    """
    if row["status"] not in ACTIVE or served == NOT_SERVED:
        return str(row["status"])
    if row["waits_for"] is not None:
        return WAITING if row["waits_for"] else IDLE
    return QUEUED if row["name"] in served.queued else str(row["status"])


def is_silent(path: Path) -> bool:
    """Returns whether a file that a process touches every second is no longer touched; takes 3 s if it seems so."""
    last = _silent_since(path)
    if last is None:
        return False
    time.sleep(3 * BEAT_SECONDS)  # the system clock may have been changed, so wait for a heartbeat
    return _time_of(path) == last


def _hanging(directory: Path, runs: Sequence[str]) -> frozenset[str]:
    silent = {run: last for run in runs if (last := _silent_since(engine_directory(directory, run) / FILE)) is not None}
    if silent:
        time.sleep(3 * BEAT_SECONDS)  # the system clock may have been changed, so wait for a heartbeat
    return frozenset(run for run, last in silent.items() if _time_of(engine_directory(directory, run) / FILE) == last)


def _silent_since(path: Path) -> int | None:
    """Returns the time of the last heartbeat if it was long ago; None also if there is none, since engines start."""
    last = _time_of(path)
    return None if last is None or abs(time.time() - last / 1e9) < SILENT_SECONDS else last


def _time_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
