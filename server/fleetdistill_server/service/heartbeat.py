"""An engine's heartbeat: a file in the engine's directory whose modification time the engine updates every second.

The front and the supervisor have one too, in the store's directory: the event loop of the front updates it, since it
answers devices, and the loop of the supervisor, since it looks after the others. Updating needs no room on the disk.
A separate thread writes it, because a distillation may occupy the engine for hours without being hung. The heartbeat
therefore proves that the process runs, not that its round progresses: it stops when the process is stopped, frozen or
blocked in the kernel. The heartbeat is a file and not a row, because an engine that waits for devices or for disk space
does not write to the database. Observers measure with their own monotonic clock how long the file has not changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fleetdistill_server.logs import about
from fleetdistill_server.texts import when

__all__ = ["FILE"]

FILE, FRONT_FILE, SUPERVISOR_FILE = "engine.beat", "front.beat", "supervisor.beat"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which a process is reported as hung."""
START_SECONDS = 120.0
"""Seconds after which an engine that has not sent its first heartbeat is reported; importing torch may take a while."""
logger = logging.getLogger("fleetdistill.server.supervisor")


def start_heartbeat(directory: Path) -> None:
    """Starts a thread that sends heartbeats until this process exits."""

    def beat_forever() -> None:
        while True:
            beat(directory / FILE)
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat_forever, name="heartbeat", daemon=True).start()


def beat(path: Path) -> None:
    """Sends a heartbeat, if the disk lets it."""
    with contextlib.suppress(OSError):  # the disk is full, or the store is being deleted
        path.touch()


def clear_heartbeat(directory: Path, file: str = FILE) -> None:
    """Deletes the heartbeat file of an earlier process."""
    with contextlib.suppress(OSError):
        (directory / file).unlink(missing_ok=True)


class HeartbeatMonitor:
    """Observes the heartbeat of a process. Its supervisor alone decides from it whether the process hangs.

    Args:
        directory: The engine's directory; the store's for the front.
        clock: A monotonic clock in seconds.
        file: Name of the file.

    Attributes:
        seen: Whether a heartbeat has arrived since this object was created.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic, file: str = FILE) -> None:
        self._path = directory / file
        self._clock = clock
        self._last = _time_of(self._path)
        self._looked = clock()
        self._silent = 0.0
        self._logged = False
        self.seen = False

    @property
    def begun(self) -> bool:
        """Whether there is a heartbeat, perhaps an old one; an engine that starts has none yet."""
        return self._last is not None

    @property
    def is_late(self) -> bool:
        """Whether a process that starts has sent no heartbeat for `START_SECONDS`, as of the last `silent_seconds`."""
        return self._last is None and self._silent >= START_SECONDS

    @property
    def hangs(self) -> str:
        """Since when the process hangs, as of the last `silent_seconds`; empty if it does not, or only starts."""
        return when(self._last / 1e9) if self._last is not None and self._silent >= SILENT_SECONDS else ""

    def silent_seconds(self) -> float:
        """Returns the seconds since the last heartbeat; call this regularly.

        A gap between two calls counts as at most one heartbeat interval, because the caller may have been suspended.
        """
        now = self._clock()
        result = _time_of(self._path)
        self._silent += min(now - self._looked, BEAT_SECONDS)
        self._looked = now
        if result is not None and result != self._last:
            self._last = result
            self._silent = 0.0
            self.seen = True
        return self._silent

    def log_hang(self, what: str, run: str = "") -> str:
        """Logs when a hang begins and when it ends, one line each; call this after `silent_seconds`.

        Returns:
            The line that was logged; empty if nothing has changed.
        """
        if bool(self.hangs) == self._logged:
            return ""
        self._logged = not self._logged
        text = f"hangs: it has sent no heartbeat since {self.hangs}" if self._logged else "no longer hangs"
        logger.warning("%s %s", what, text, extra=about(run=run))
        return f"{what} {text}"


def silent_since(path: Path) -> str:
    """Returns since when a file that a process touches every second is not touched; empty if it is.

    Takes 3 s if it seems not to be.
    """
    last = _time_of(path)
    if last is None or abs(time.time() - last / 1e9) < SILENT_SECONDS:
        return ""
    time.sleep(3 * BEAT_SECONDS)  # the system clock may have been changed, so wait for a heartbeat
    return when(last / 1e9) if _time_of(path) == last else ""


def _time_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
