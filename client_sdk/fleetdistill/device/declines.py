"""The ask that a device declined last: the same ask again is declined without new work."""

from __future__ import annotations

from fleetdistill.errors import FleetDistillError
from fleetdistill.wire.v1 import service_pb2

MAX_REASON = 512
"""Characters of a reason that a server keeps."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


class Declines:
    """Remembers one ask; a server has one open at a time."""

    def __init__(self) -> None:
        self._ask = b""
        self._times = 0
        self._reported = False
        self.reason = FleetDistillError()

    def knows(self, ask: service_pb2.Ask) -> bool:
        """Whether this very ask was the last one that was declined."""
        return self._times > 0 and self._ask == _name(ask)

    def note(self, ask: service_pb2.Ask, reason: FleetDistillError) -> float:
        """Notes that an ask is declined; returns the seconds to wait before the reply, 0 the first time."""
        if not self.knows(ask):
            self._ask, self._times, self._reported, self.reason = _name(ask), 0, False, reason
        self._times += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(self._times - 2, 10)
        return min(pause, _LONGEST_PAUSE_SECONDS) if self._times > 1 else 0.0

    def is_first_report(self) -> bool:
        """Whether the app has had no event about this ask; from now on it has."""
        reported, self._reported = self._reported, True
        return not reported


def _name(ask: service_pb2.Ask) -> bytes:
    """What names a question; the seconds left and the rounds completed do not."""
    named = service_pb2.Ask(
        round=ask.round,
        step_number=ask.step_number,
        step=ask.step,
        payload=ask.payload,
        seed=ask.seed,
        first_attempt=ask.first_attempt,
    )
    return named.SerializeToString(deterministic=True)
