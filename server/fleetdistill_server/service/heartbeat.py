"""The engine's sign of life: a file in the store's directory whose time a thread of the engine sets every second.

A thread of its own, because a distillation may keep the engine from all else for hours, and that is no hang. So a beat
proves that the process runs, not that its round comes on: it stops where the process is stopped, frozen or stuck in the
kernel. A file and not a row, because an engine that waits for months, or for space on a full disk, writes nothing. Who
watches counts seconds of its own in which the file did not change, whatever the system's clock says.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetdistill_server.service.serve_lock import served_run

FILE = "engine.beat"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""After so long without a beat the engine is said to hang."""


def begin_beats(directory: Path) -> None:
    """Beats from now on until this process ends."""
    path = directory / FILE

    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk, or a store that is being deleted
                path.touch()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def forget_beats(directory: Path) -> None:
    """Deletes what an earlier engine has left."""
    with contextlib.suppress(OSError):
        (directory / FILE).unlink(missing_ok=True)


class Beats:
    """Watches an engine.

    Args:
        directory: The store's.
        clock: Seconds that nobody can set.

    Attributes:
        seen: Whether it has beaten since this object was made.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory / FILE
        self._clock = clock
        self._last, self._looked, self._silent = _time_of(self._path), clock(), 0.0
        self.seen = False

    def silent_seconds(self) -> float:
        """Seconds without a beat; to be called again and again.

        A gap between two calls counts for one beat at most: who was stopped itself has heard nothing meanwhile.
        """
        now, found = self._clock(), _time_of(self._path)
        self._silent += min(now - self._looked, BEAT_SECONDS)
        self._looked = now
        if found is not None and found != self._last:
            self._last, self._silent, self.seen = found, 0.0, True
        return self._silent


@dataclass(frozen=True)
class Served:
    """Which run of a store a server works on, and whether its engine hangs."""

    run: str | None = None
    hangs: bool = False


NOBODY = Served()
"""No run is served."""


def served(directory: Path) -> Served:
    """Looks at a store's server; for some seconds where its engine seems to hang."""
    run = served_run(directory)
    return Served(run, run is not None and _hangs(directory))


def _hangs(directory: Path) -> bool:
    path = directory / FILE
    last = _time_of(path)
    if last is None or abs(time.time() - last / 1e9) < SILENT_SECONDS:
        return False
    time.sleep(3 * BEAT_SECONDS)  # the clock may have been set: does it beat?
    return _time_of(path) == last


def _time_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
