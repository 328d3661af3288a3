"""A device's clock. Tests of an app can use `fleetdistill.testing.ManualClock` instead."""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """Protocol of a device's clock."""

    def now(self) -> float:
        """Returns seconds since an arbitrary start; never decreases."""

    def time(self) -> float:
        """Returns the machine's time of day, in seconds since 1970-01-01 UTC; may be changed by the user."""

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Blocks until the event is set or `seconds` have passed."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Returns seconds since an arbitrary start; not affected by changes of the system time."""
        return time.monotonic()

    def time(self) -> float:
        """Returns the machine's time of day, in seconds since 1970-01-01 UTC."""
        return time.time()

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Blocks until the event is set or `seconds` have passed."""
        event.wait(seconds)
