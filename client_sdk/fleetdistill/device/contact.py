"""The device and its server: the link, whether the server can be reached, and refusals that may be withdrawn."""

from __future__ import annotations

import math
import random
from pathlib import Path

from fleetdistill.clock import Clock
from fleetdistill.device.events import Events
from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.spans import NO_SPANS, Spans
from fleetdistill.wire.codes import Code, after_seconds, is_final
from fleetdistill.wire.v1 import service_pb2

_FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 15.0
"""Longest pause between two attempts to reach the server, in seconds, unless the server requests a longer one."""
_MAX_NOT_READY_SECONDS = 5.0
"""Longest pause before the next attempt while the server replies that it is not ready."""
_ONE_REPORT_SECONDS = 5.0
"""How long after a report of a lost contact another cause of it is not reported."""

_WAITS = {Code.NOT_READY: "keeps asking", Code.BAD_IDENTITY: "checks in again"}
"""What the device does after replies with which there is contact."""

_ONLY_ERASE = "To erase this device's files only: forget(local=True), or `fleetdistill device forget --local`"
_pauses = random.Random()  # the app may have seeded the generator of the module `random`


class Contact:
    """Tracks the contact with the server; emits `lost-contact` and `contact-returned`.

    While the server replies that it is not ready, for example because the run is being prepared, or that it does not
    know the device, because its store is new, the device has contact and waits: `waiting` and `resumed`.

    Args:
        events: Emits events to the app.
        clock: Clock that measures how long the contact was lost.
    """

    def __init__(self, events: Events, clock: Clock) -> None:
        self._events, self._clock = events, clock
        self._pause = _FIRST_PAUSE_SECONDS
        self._reason = ""  # the last reported error; empty while there is none
        self._known = False  # whether the server has ever replied
        self._lost_at: float | None = None  # None while there is contact
        self._reported_at = -math.inf  # when the last loss was reported
        self._waits = False  # whether the server was not ready

    @property
    def is_lost(self) -> bool:
        """Whether the server has not replied since the last attempt failed."""
        return self._lost_at is not None

    def lost(self, error: LinkError) -> float:
        """Records a failed attempt; returns the seconds to wait before the next one, with exponential backoff.

        Emits one event for consecutive errors with the same text, and at most one in 5 seconds of an outage: a server
        that ends first cancels calls and then refuses connections.
        """
        is_reply = error.code in _WAITS
        if is_reply:
            self._note_reply()
        elif self._lost_at is None:
            self._lost_at = self._clock.now()
        reported = not is_reply and self._clock.now() - self._reported_at < _ONE_REPORT_SECONDS
        if str(error) != self._reason and not reported:
            self._reason = str(error)
            if is_reply:
                self._waits = True
                text = f"{self._reason}; the device {_WAITS[Code(error.code)]}"
                self._events.emit("waiting", 0, text, {"condition": "server"})
            else:
                self._reported_at = self._clock.now()
                first = "" if self._known else "no contact since the start: "
                self._events.emit("lost-contact", 0, f"{first}{self._reason}; the device keeps trying")
        longest = min(self._pause, _MAX_NOT_READY_SECONDS) if is_reply else self._pause
        pause = error.after_seconds + _pauses.uniform(longest / 2, longest)
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        return pause

    def restored(self) -> None:
        """Records that the server replied and is ready; emits an event if the contact was lost or the device waited."""
        self._reason = ""
        self._note_reply()
        if self._waits:
            self._waits = False
            self._events.emit("resumed", 0, "the server is ready", {"condition": "server"})

    def _note_reply(self) -> None:
        self._reported_at = -math.inf
        if self._lost_at is not None:
            seconds = self._clock.now() - self._lost_at
            self._lost_at = None
            again = " again" if self._known else ""
            text = f"the server can be reached{again} after {seconds:.0f} seconds"
            self._events.emit("contact-returned", 0, text, {"seconds": seconds})
        self._known = True

    def reset_pause(self) -> None:
        """Makes the next pause short again, after a turn without an error."""
        self._pause = _FIRST_PAUSE_SECONDS


def open_link(server: str, token: str | Path | None, directory: Path, device_id: str, spans: Spans = NO_SPANS) -> Link:
    """Returns a link with TLS if the device is enrolled or has a token, else plain text. Never downgrades from TLS."""
    from fleetdistill.link.grpc_link import GrpcLink

    if token is None and not is_enrolled(directory):
        return GrpcLink(server, spans=spans)
    from fleetdistill.link.enrolment import Enrolment

    return GrpcLink(server, Enrolment(server, directory, device_id, token), spans=spans)


def link_error(refusal: RefusedError) -> LinkError:
    """Returns the error for a temporary refusal, with the time before a retry."""
    return LinkError(str(refusal), after_seconds(refusal.details), refusal.code)


def request_forgetting(link: Link, identity: service_pb2.Identity, *, accepted: bool) -> bool:
    """Asks the server to delete what a device has sent.

    Args:
        link: Link to the server.
        identity: The device's identity.
        accepted: Whether a server has accepted the device, and so has data of it.

    Returns:
        True if the server has durably recorded the request, or has no data of the device; False if it does not know
        the request, so that only its operator can be asked.

    Raises:
        LinkError: The server is unavailable, or temporarily refuses requests.
        RefusedError: The server refuses the caller, or does not know a device that a server has accepted.
    """
    try:
        return link.leave(identity, forget=True)
    except RefusedError as refusal:
        if refusal.code == Code.UNKNOWN_RUN or "check_in" in refusal.details:
            if not accepted:
                return True
            raise RefusedError(
                refusal.code,
                f"this server cannot delete what the device has sent, because it does not know the device: {refusal}. "
                "Nothing was erased. Ask the server that has accepted the device, unless it has deleted the run. "
                f"{_ONLY_ERASE}",
                refusal.details,
            ) from refusal
        if is_final(refusal.code):
            raise RefusedError(
                refusal.code, f"{refusal}; nothing was erased. {_ONLY_ERASE}", refusal.details
            ) from refusal
        raise link_error(refusal) from refusal
