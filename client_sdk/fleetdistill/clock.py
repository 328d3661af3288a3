"""The time that a device waits by. An app's tests put `fleetdistill.testing.ManualClock` in its place."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What a device needs of time."""

    def now(self) -> float:
        """Seconds since some beginning; they never go back."""

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Returns when the event is set, or after so many seconds."""


class SystemClock:
    """The time of this machine."""

    def now(self) -> float:
        """Seconds since some beginning, whatever is done to the system's clock."""
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Returns when the event is set, or after so many seconds."""
        event.wait(seconds)
