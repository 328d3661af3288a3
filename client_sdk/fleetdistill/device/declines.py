"""The ask that a device has declined last: a server that asks the same again gets the same word, without new work."""

from __future__ import annotations

from fleetdistill.errors import FleetDistillError
from fleetdistill.wire.v1 import service_pb2

MAX_REASON = 512
"""Characters of a reason that a server keeps."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


class Declines:
    """Knows one ask; a server has one open at a time."""

    def __init__(self) -> None:
        self._ask = b""
        self._times = 0
        self._told = False
        self.reason = FleetDistillError()

    def knows(self, ask: service_pb2.Ask) -> bool:
        """Whether this very ask was the last one that was declined."""
        return self._times > 0 and self._ask == _name(ask)

    def note(self, ask: service_pb2.Ask, reason: FleetDistillError) -> float:
        """Notes that an ask is declined; returns the seconds to wait before it is said, 0 the first time."""
        if not self.knows(ask):
            self._ask, self._times, self._told, self.reason = _name(ask), 0, False, reason
        self._times += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(self._times - 2, 10)
        return min(pause, _LONGEST_PAUSE_SECONDS) if self._times > 1 else 0.0

    def is_news(self) -> bool:
        """Whether the app has not been told of this one; from now on it has."""
        told, self._told = self._told, True
        return not told


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
