"""When a failed engine is started again, and when its run is stopped instead."""

from __future__ import annotations

import re
from collections import Counter

FIRST_SECONDS, MAX_SECONDS = 0.2, 300.0
"""Pauses before the first and before a late restart; they double in between."""
MAX_FAILURES = 6
"""How often an engine may fail in the same way at the same point before its run is stopped."""
MAX_KILLS = 12
"""The same for an engine that was killed from outside: the last pauses are then minutes, which outlast a busy machine
or an operator's mistake. The kernel also kills an engine that lacks memory, at the same point each time."""
_DOUBLINGS = 16
"""Upper bound on the exponent; pauses reach `MAX_SECONDS` before it."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What differs between two texts about the same failure, such as addresses and sizes."""


class Restarts:
    """The failures of one run's engine since its last progress.

    Attributes:
        repeated: How often the last failure has happened.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._point: object = None
        self._causes = Counter[str]()

    def forget(self) -> None:
        """Forgets all failures."""
        self._causes.clear()

    @property
    def failures(self) -> int:
        """Number of failures since the last progress, of any cause."""
        return self._causes.total()

    def has_progressed(self, point: object) -> bool:
        """Returns whether a run has come further since the last failure; see `pause_after`."""
        return point != self._point

    def pause_after(self, cause: str, point: object, *, killed: bool = False) -> float | None:
        """Records a failure.

        Args:
            cause: Why the engine failed, in words.
            point: How far the run has come; any change since the last failure is progress.
            killed: Whether the engine was killed from outside.

        Returns:
            Seconds until the engine is started again; None to stop the run, because the engine failed in the same way
            at the same point `MAX_FAILURES` times, or `MAX_KILLS` times if it was killed.
        """
        if self.has_progressed(point):
            self._point = point
            self.forget()
        same = _VARYING.sub("#", cause)
        self._causes[same] += 1
        self.repeated = self._causes[same]
        if self.repeated >= (MAX_KILLS if killed else MAX_FAILURES):
            return None
        return float(min(FIRST_SECONDS * 2.0 ** min(self.failures - 1, _DOUBLINGS), MAX_SECONDS))
