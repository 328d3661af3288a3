"""One turn of a device: settles an unfinished answer, or requests an ask and answers it."""

from __future__ import annotations

import contextlib
import threading

from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.contact import Contact
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.events import Step
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.permission import EligibilityGate
from fleetdistill.device.sender import Sender
from fleetdistill.errors import FleetDistillError, LinkError, NoSamplesError, WorkInterrupted
from fleetdistill.link.terms import pause_seconds, plain
from fleetdistill.wire.v1 import service_pb2

POLL_SECONDS = 20.0
"""How long the server may hold a request for work."""


class Turns:
    """Runs turns, which all loops of a device consist of. One thread at a time may use it.

    Args:
        parts: What the parts of the open device share.
        contact: Tracks whether the server can be reached.
        check_in: Checks the device in.
        sender: Sends answers.
        deployer: Keeps and exports the delivered models.
        handler: Handles asks.
        stopped: Set when the app stops the device.
    """

    def __init__(
        self,
        parts: DeviceParts,
        contact: Contact,
        check_in: CheckIn,
        sender: Sender,
        deployer: Deployer,
        handler: AskHandler,
        stopped: threading.Event,
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._contact = contact
        self._check_in = check_in
        self._sender = sender
        self._deployer = deployer
        self._handler = handler
        self._stopped = stopped
        self._gate = EligibilityGate(parts.permission, parts.events, parts.link, stopped, self.leave)
        self._ask_interrupted = False  # whether the work on the last ask is done again later
        self._asks_since: float | None = None  # when the device first asked for work that there was none of

    def turn(self, wait_seconds: float) -> tuple[Step, float]:
        """Runs one turn.

        Args:
            wait_seconds: How long the server may hold the request if there is no work.

        Returns:
            The result, PAUSED if the device was stopped before the end of the turn, and the seconds to wait before the
            next turn.

        Raises:
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full.
            RefusedError: The server refuses this device permanently.
        """
        if self._stopped.is_set():
            return Step.PAUSED, 0.0
        self._events.emit_put_aside(self._parts.storage.put_aside)  # found at the start
        if seconds := self._gate.seconds_to_wait():
            return Step.WAITED, seconds
        try:
            with self._gate.working(), self._check_in.as_link_errors():
                result = self._settle_or_answer(wait_seconds)
        except WorkInterrupted:
            return Step.PAUSED if self._stopped.is_set() else Step.WAITED, 0.0
        except NoSamplesError as none:  # without samples the device does not ask for work, which it cannot do
            self._events.emit_no_samples(str(none))
            return Step.WAITED, wait_seconds
        except LinkError:
            if not self._stopped.is_set():
                raise
            return Step.PAUSED, 0.0  # the stop cancelled a call
        self._contact.reset_pause()
        self._events.emit_put_aside(self._parts.storage.put_aside)  # found during the turn
        return result

    def leave(self) -> bool:
        """Leaves the run, unless the device has not checked in or still owes an answer; returns whether it called."""
        if self._check_in.terms is None or self._ask_interrupted:
            return False
        with contextlib.suppress(FleetDistillError):
            if self._parts.storage.outbox.pending() is not None:
                return False
            self._parts.link.leave(self._parts.identity)
        return True

    def _settle_or_answer(self, wait_seconds: float) -> tuple[Step, float]:
        with self._parts.lock.held():
            self._check_in.take_replaced_data()
            terms = self._check_in.current_terms(self._contact.restored)
            pending = self._parts.storage.outbox.pending()
            self._events.emit_put_aside(self._parts.storage.put_aside)
        if pending is not None:
            acknowledged = self._sender.settle(pending, terms)
            self._contact.restored()
            return Step.ANSWERED if acknowledged else Step.DECLINED, 0.0
        self._sender.emit_outcome()  # left by an earlier process that ended before it emitted the events
        self._check_in.check_in_changed_data()
        self._deployer.settle()
        if not self._check_in.has_samples():
            raise NoSamplesError()
        asked_at = self._parts.clock.now()
        response = self._parts.link.next_ask(self._parts.identity, wait_seconds)
        self._contact.restored()
        self._note_work(response, asked_at)
        return self._handle(response, terms)

    def _note_work(self, response: service_pb2.NextAskResponse, asked_at: float) -> None:
        """Emits an event once the run has had no work for a while, and one when it has."""
        if response.WhichOneof("next") in ("ask", "finished") or response.come_back.reason:
            self._asks_since = None
            self._events.emit_work(there_is_some=response.HasField("ask"))
            return
        self._asks_since = asked_at if self._asks_since is None else self._asks_since
        if self._parts.clock.now() - self._asks_since >= POLL_SECONDS:
            self._events.emit_no_work()

    def _handle(self, response: service_pb2.NextAskResponse, terms: service_pb2.CheckInResponse) -> tuple[Step, float]:
        self._ask_interrupted = False  # the server offers an interrupted ask again, or has closed it
        match response.WhichOneof("next"):
            case "ask":
                self._events.emit_reason("")
                try:
                    return self._handler.handle(response.ask, terms)
                except (WorkInterrupted, KeyboardInterrupt):
                    self._ask_interrupted = True
                    raise
            case "finished":
                self._finish(response.finished)
                return Step.FINISHED, 0.0
            case _:
                seconds = pause_seconds(response.come_back, self._parts.link.remote)
                self._parts.permission.pace.set(seconds)
                self._events.emit_reason(response.come_back.reason)
                return Step.WAITED, seconds

    def _finish(self, reason: str) -> None:
        self._deployer.finish()
        text = plain(reason)
        if not self._deployer.version:
            text += "; no model was delivered to this device, and the run delivers none any more: its operator can "
            text += "continue it with more rounds, or without an end (rounds = 0)"
        self._events.emit("finished", 0, text)
