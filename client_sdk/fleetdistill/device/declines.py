"""Declines asks, and stores the last declined one, so that a repetition is declined without new work."""

from __future__ import annotations

from fleetdistill.device.private import guarantee_of, reason_to_send
from fleetdistill.device.session import Session
from fleetdistill.errors import FleetDistillError, NoRoomError
from fleetdistill.state.sent_ledger import decline_entry
from fleetdistill.wire.v1 import service_pb2

MAX_REASON = 512
"""Maximum length of a decline's reason, in characters; the server stores at most as many."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0
_NO_ROOM = "the device's disk is full"


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
        """Records a declined ask; returns the seconds to wait afterwards, 0 for the first time."""
        if not self.was_declined(ask):
            self._ask = _name(ask)
            self._times = 0
            self._reported = False
            self.reason = reason
        self._times += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(self._times - 2, 10)
        return min(pause, _LONGEST_PAUSE_SECONDS) if self._times > 1 else 0.0

    def is_first_report(self) -> bool:
        """Returns True on the first call for the current ask, so that the app gets one event."""
        reported, self._reported = self._reported, True
        return not reported


def send_decline(session: Session, round: int, step: str, step_number: int, reason: FleetDistillError) -> None:
    """Declines an ask, after recording the reason in the ledger: it can describe the device's data."""
    private = session.terms is not None and guarantee_of(session.terms.contract) is not None
    text = (reason_to_send(reason) if private else str(reason))[:MAX_REASON]
    try:
        session.storage.ledger.record(decline_entry(session.identity.run, round, step, step_number, text))
    except NoRoomError:
        text = _NO_ROOM  # independent of the data
    session.link.decline(
        service_pb2.DeclineRequest(identity=session.identity, round=round, step_number=step_number, reason=text)
    )


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
