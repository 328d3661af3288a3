"""A clock that a test moves."""

from __future__ import annotations

import threading


class ManualClock:
    """Time that passes only when somebody waits by it, and then at once: `Device(clock=ManualClock())`.

    Give the same clock to `fleetdistill_server.testing.MemoryServer`, and deadlines pass with the device's waits.

    Args:
        now: Seconds at which it begins.

    Attributes:
        waits: Seconds of each wait so far, in order.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self.waits: list[float] = []

    def now(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass. Raises ValueError for less than 0 seconds."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}, must be at least 0: time does not go back")
        self._now += seconds

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Advances by so many seconds and returns at once; an event that is set already takes no time."""
        if not event.is_set():
            self.waits.append(seconds)
            self.advance(max(seconds, 0.0))
