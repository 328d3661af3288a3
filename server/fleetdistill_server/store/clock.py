"""Time for deadlines: seconds since 1970 that go on evenly, whatever is done to the system's clock.

A deadline stands in the store, so that a restarted engine finds it. Within a process it is held against a clock that
reads the system's once and then counts seconds: a clock that is set back by an hour holds no round up for an hour, and
one that is set forward ends none. Across a restart nobody can tell a clock that was moved from time that has passed; so
a restarted engine gives an open ask the run's whole deadline at most (`Asks.bound_deadlines`).
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Begins at the system's time and goes on by itself.

    Args:
        system: Seconds since 1970, which anybody may set.
        steady: Seconds that nobody can set, from any beginning.
    """

    def __init__(self, system: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._offset = system() - steady()

    def now(self) -> float:
        """Seconds since 1970 as this clock counts them."""
        return self._steady() + self._offset


PROCESS = Clock()
"""This process's."""
