"""The clock of a simulation in simulated time."""

from __future__ import annotations

import threading

from fleetdistill.testing import ManualClock
from fleetdistill_server.store.clock import Clock

START = 1_767_225_600.0
"""Simulated time at which every simulation starts: 2026-01-01 00:00 UTC, in seconds since 1970."""


class SimulatedClock(ManualClock):
    """Time of day and monotonic time of server and devices in a simulation; only the simulation advances it."""

    def __init__(self) -> None:
        super().__init__(now=START, time=START)

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Returns immediately; the simulation decides when the device continues."""

    @property
    def elapsed(self) -> float:
        """Simulated seconds since the simulation's start."""
        return self.now() - START

    def for_store(self) -> Clock:
        """Returns the clock for a store's deadlines and times."""
        return Clock(self.now, self.now)
