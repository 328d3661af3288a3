"""The last ask that a device declined, so that a repetition is declined without new work."""

from __future__ import annotations

from fleetdistill.errors import FleetDistillError
from fleetdistill.wire.v1 import service_pb2

MAX_REASON = 512
"""Maximum length of a decline's reason, in characters; the server stores at most as many."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


class Declines:
    """Stores the last declined ask; a server has at most one open ask per device."""

    def __init__(self) -> None:
        self._ask = b""
        self._times = 0
        self._reported = False
        self.reason = FleetDistillError()

    def was_declined(self, ask: service_pb2.Ask) -> bool:
        """Returns whether this ask was the last declined one."""
        return self._times > 0 and self._ask == _name(ask)

    def note(self, ask: service_pb2.Ask, reason: FleetDistillError) -> float:
        """Records a declined ask; returns the seconds to wait before the reply, 0 for the first time."""
        if not self.was_declined(ask):
            self._ask, self._times, self._reported, self.reason = _name(ask), 0, False, reason
        self._times += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(self._times - 2, 10)
        return min(pause, _LONGEST_PAUSE_SECONDS) if self._times > 1 else 0.0

    def is_first_report(self) -> bool:
        """Returns True on the first call for the current ask, so that the app gets one event."""
        reported, self._reported = self._reported, True
        return not reported


def _name(ask: service_pb2.Ask) -> bytes:
    """Returns the fields that identify an ask, serialized: all but the seconds left and the completed rounds."""
    named = service_pb2.Ask(
        round=ask.round,
        step_number=ask.step_number,
        step=ask.step,
        payload=ask.payload,
        seed=ask.seed,
        first_attempt=ask.first_attempt,
    )
    return named.SerializeToString(deterministic=True)
