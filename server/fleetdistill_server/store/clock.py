"""Clock for deadlines: Unix time in seconds that is unaffected by changes to the system clock.

Deadlines are stored, so that a restarted engine restores them. Within a process they are compared with a clock that
reads the system time once and then counts monotonic seconds. Changing the system clock therefore neither delays nor
ends a round. Across a restart, a changed system clock cannot be distinguished from elapsed time, so a restarted engine
limits each open ask to the run's deadline, counted from the restart (`Asks.bound_deadlines`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Starts at the system time and then advances monotonically.

    Args:
        system: Returns the system time in seconds since 1970.
        steady: Returns monotonic seconds; the origin does not matter.
    """

    def __init__(self, system: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._offset = system() - steady()

    def now(self) -> float:
        """Returns the current time in seconds since 1970."""
        return self._steady() + self._offset


PROCESS = Clock()
"""Clock shared by this process."""
