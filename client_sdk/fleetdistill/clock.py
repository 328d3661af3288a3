"""A device's clock. Tests of an app can use `fleetdistill.testing.ManualClock` instead."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Protocol of a device's clock."""

    def now(self) -> float:
        """Returns seconds since an arbitrary start; never decreases."""

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Blocks until the event is set or `seconds` have passed."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Returns seconds since an arbitrary start; not affected by changes of the system time."""
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Blocks until the event is set or `seconds` have passed."""
        event.wait(seconds)
