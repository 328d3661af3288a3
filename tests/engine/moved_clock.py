"""A system clock that a test sets, and seconds that pass when it says so."""

from __future__ import annotations

from fleetdistill_server.store.clock import Clock


class MovedClock:
    """Both sources of `Clock`.

    Attributes:
        system: Seconds since 1970, which may be set.
        steady: Seconds since some beginning.
    """

    def __init__(self) -> None:
        self.system, self.steady = 1_700_000_000.0, 50.0

    def clock(self) -> Clock:
        """The clock of a process that starts now."""
        return Clock(lambda: self.system, lambda: self.steady)

    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self.system, self.steady = self.system + seconds, self.steady + seconds

    def set_system(self, by: float) -> None:
        """Somebody sets the system's clock; no time passes."""
        self.system += by
