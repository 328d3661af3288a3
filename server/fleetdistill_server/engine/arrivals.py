"""Answers that arrive before the engine needs them: verified and prepared while it waits for other devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fleetdistill_server.methods.cohort import DeviceAnswer, Prepare
from fleetdistill_server.store.records import Ask

MAX_ROWS = 64
"""Number of answers that are looked up at once, which bounds the work between two checks of the waking device."""


class Arrivals:
    """The answers of one step that were read early.

    Args:
        answered_after: Returns the answered asks of the step after a device, ordered by device, at most `MAX_ROWS`.
        read: Reads and verifies the answer to an ask; returns None if its payload is lost.
        prepare: The method's function for each answer; None to verify only, which keeps no file open.
    """

    def __init__(
        self,
        answered_after: Callable[[str], Sequence[Ask]],
        read: Callable[[Ask], DeviceAnswer | None],
        prepare: Prepare | None,
    ) -> None:
        self._answered_after = answered_after
        self._read = read
        self._prepare = prepare
        self._cursor = ""
        self._found: deque[Ask] = deque()  # answered and not read yet
        self._seen: set[int] = set()
        self._ready: dict[int, DeviceAnswer] = {}

    def read_one(self, after: str) -> bool:
        """Reads one answer that has arrived from a device after `after`; returns False if there is no new one."""
        while self._found and self._found[0].device <= after:
            self._found.popleft()  # `take` has read it
        if not self._found:
            asks = self._answered_after(max(self._cursor, after))
            self._cursor = asks[-1].device if len(asks) == MAX_ROWS else ""
            self._found += [ask for ask in asks if ask.id not in self._seen]
        if not self._found:
            return False
        new = self._found.popleft()
        self._seen.add(new.id)
        answer = self._read(new)
        if answer is None:
            self._seen.discard(new.id)  # the device is asked again or drops out
        elif self._prepare is not None:
            answer.prepared = self._prepare(answer)
            self._ready[new.id] = answer
        return True

    def take(self, ask: Ask) -> DeviceAnswer | None:
        """Returns the prepared answer to an ask; None if its payload is lost."""
        ready = self._ready.pop(ask.id, None)
        if ready is not None:
            return ready
        answer = self._read(ask)
        if answer is not None and self._prepare is not None:
            answer.prepared = self._prepare(answer)
        return answer
