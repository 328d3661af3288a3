"""A clock that a test controls."""

from __future__ import annotations

import threading
from datetime import datetime


class ManualClock:
    """Clock whose waits return immediately and advance the time: `Device(runtime=Runtime(clock=ManualClock()))`.

    Pass the same clock to `fleetdistill_server.testing.MemoryServer`, so that the device's waits also
    advance the server's deadlines.

    Args:
        now: Initial time in seconds.
        time: Initial time of day, in seconds since 1970-01-01 UTC. Default: 2026-01-01 12:00 in local time.

    Attributes:
        waits: Durations of all waits so far, in seconds.
    """

    def __init__(self, now: float = 0.0, time: float | None = None) -> None:
        self._now = now
        self._offset = (datetime(2026, 1, 1, 12).timestamp() if time is None else time) - now
        self.waits: list[float] = []

    def now(self) -> float:
        """Returns the current time in seconds."""
        return self._now

    def time(self) -> float:
        """Returns the current time of day, in seconds since 1970-01-01 UTC."""
        return self._offset + self._now

    def advance(self, seconds: float) -> None:
        """Advances the time. Raises ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}, must be at least 0")
        self._now += seconds

    def advance_to(self, now: float) -> None:
        """Advances the time to `now` seconds. Raises ValueError if it is later already."""
        if now < self._now:
            raise ValueError(f"now is {now}, must be at least {self._now}")
        self._now = now

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Advances the time by `seconds` unless the event is set; returns immediately."""
        if not event.is_set():
            self.waits.append(seconds)
            self.advance(max(seconds, 0.0))
