"""The events to come in simulated time, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import IntEnum


class Kind(IntEnum):
    """Kinds of events. At equal times, events happen in this order."""

    RETURNS = 0
    """A device becomes available."""
    ANSWERS = 1
    """A device has finished its work on an ask."""
    GOES = 2
    """A device becomes unavailable."""
    LEASE = 3
    """The lease of a device that lost contact ends."""
    DEADLINE = 4
    """The deadline of an ask has passed."""


class Agenda:
    """Events ordered by time, kind and device, so that their order does not depend on the order of additions."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Kind, str]] = []

    def add(self, at: float, kind: Kind, device: str = "") -> None:
        """Adds an event at a simulated time in seconds."""
        heapq.heappush(self._events, (at, kind, device))

    def next_time(self) -> float | None:
        """Returns the time of the next event, or None if there is none."""
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> Iterator[tuple[Kind, str]]:
        """Removes and yields the events up to `now`, also those that are added meanwhile."""
        while self._events and self._events[0][0] <= now:
            _, kind, device = heapq.heappop(self._events)
            yield kind, device
