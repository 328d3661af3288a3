"""The turns of a device, which all its loops run: in the foreground, in a thread, in the app's own or in asyncio."""

from __future__ import annotations

import threading

from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.contact import Contact
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.events import Events, Step
from fleetdistill.device.manners import Manners
from fleetdistill.device.sender import Sender
from fleetdistill.device.session import Session
from fleetdistill.device.temporary_refusals import as_link_errors
from fleetdistill.errors import LinkError, NoSamplesError, WorkInterrupted
from fleetdistill.link.terms import pause_seconds, plain
from fleetdistill.wire.v1 import service_pb2

POLL_SECONDS = 20.0


class Engine:
    """Runs turns: settles an unfinished answer, or requests an ask and answers it. One thread at a time may use it.

    Args:
        session: State of the open device.
        events: Emits events to the app.
        check_in: Checks the device in.
        sender: Sends answers.
        deployer: Keeps and exports the delivered models.
        handler: Handles asks.
        stopped: Set when the app stops the device.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        check_in: CheckIn,
        sender: Sender,
        deployer: Deployer,
        handler: AskHandler,
        stopped: threading.Event,
    ) -> None:
        self._session = session
        self._events = events
        self._check_in = check_in
        self._sender = sender
        self._deployer = deployer
        self._handler = handler
        self._stopped = stopped
        self._contact = Contact(events, session.clock)
        self._manners = Manners(session, events, stopped)
        self._pause = 0.0  # seconds to wait after the last turn
        self._resume_at = 0.0  # time before which `tick` does nothing
        self._asks_since: float | None = None  # when the device first asked for work that there was none of

    def run(self) -> None:
        """Runs turns until the run is finished or the device is stopped; retries while the server is unavailable."""
        try:
            while not self._stopped.is_set():
                try:
                    if self._turn(POLL_SECONDS) is Step.FINISHED:
                        return
                    self._wait(self._pause)
                except LinkError as error:
                    self._wait(self._contact.lost(error))
        finally:
            self._stopped.clear()

    def step(self, wait_seconds: float) -> Step:
        """Runs one turn, and waits afterwards if the server requests it. Raises LinkError if the turn failed."""
        result = self._turn(wait_seconds)
        self._wait(self._pause)
        return self._unless_stopped(result)

    def tick(self) -> Step:
        """Runs one turn without any wait; does nothing before the end of the last pause."""
        if self.pause_seconds:
            return self._unless_stopped(Step.WAITED)
        try:
            result, pause = self._turn(0.0), self._pause
        except LinkError as error:
            result, pause = Step.WAITED, self._contact.lost(error)
        self._resume_at = self._session.clock.now() + pause
        return self._unless_stopped(result)

    @property
    def pause_seconds(self) -> float:
        """Seconds until `tick` runs a turn again; 0 if it does so now."""
        return max(0.0, self._resume_at - self._session.clock.now())

    def _wait(self, seconds: float) -> None:
        if seconds:
            self._session.clock.wait(self._stopped, seconds)

    def _unless_stopped(self, result: Step) -> Step:
        """Returns the result of a turn; one that a stop has cut short ends the request to stop."""
        if result is Step.PAUSED or (result is Step.WAITED and self._stopped.is_set()):
            self._stopped.clear()
            return Step.PAUSED
        return result

    def _turn(self, wait_seconds: float) -> Step:
        """Runs one turn; returns PAUSED if the device was stopped before its end.

        Raises:
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full.
            RefusedError: The server refuses this device permanently.
        """
        self._pause = 0.0
        if self._stopped.is_set():
            return Step.PAUSED
        self._events.emit_put_aside(self._session.storage.put_aside)  # found at the start
        self._pause = self._manners.seconds_to_wait()
        if self._pause:
            return Step.WAITED
        try:
            with self._manners.working():
                result = self._work(wait_seconds)
        except WorkInterrupted:
            return Step.PAUSED if self._stopped.is_set() else Step.WAITED
        except NoSamplesError as none:
            return self._wait_for_samples(none, wait_seconds)
        except LinkError:
            if not self._stopped.is_set():
                raise
            return Step.PAUSED  # the stop cancelled a call
        self._contact.reset_pause()
        self._events.emit_put_aside(self._session.storage.put_aside)  # found during the turn
        return result

    def _work(self, wait_seconds: float) -> Step:
        """Settles an answer or handles an ask; converts temporary refusals into LinkError."""
        with as_link_errors(self._session):
            return self._settle_or_answer(wait_seconds)

    def _settle_or_answer(self, wait_seconds: float) -> Step:
        with self._session.guard.held():
            self._check_in.take_replaced_data()
            if self._check_in.is_due:
                self._check_in.check_in(self._contact.restored)
            pending = self._session.storage.outbox.pending()
            self._events.emit_put_aside(self._session.storage.put_aside)
        if pending is not None:
            acknowledged = self._sender.settle(pending)
            self._contact.restored()
            return Step.ANSWERED if acknowledged else Step.DECLINED
        self._sender.emit_outcome()  # left by an earlier process that ended before it emitted the events
        self._check_in.check_in_changed_data()
        self._deployer.settle()
        if not self._check_in.has_samples():
            raise NoSamplesError()
        asked_at = self._session.clock.now()
        response = self._session.link.next_ask(self._session.identity, wait_seconds)
        self._contact.restored()
        self._note_work(response, asked_at)
        return self._handle(response)

    def _note_work(self, response: service_pb2.NextAskResponse, asked_at: float) -> None:
        """Emits an event once the run has had no work for a while, and one when it has."""
        if response.WhichOneof("next") in ("ask", "finished") or response.come_back.reason:
            self._asks_since = None
            self._events.emit_work(there_is_some=response.HasField("ask"))
            return
        self._asks_since = asked_at if self._asks_since is None else self._asks_since
        if self._session.clock.now() - self._asks_since >= POLL_SECONDS:
            self._events.emit_no_work()

    def _wait_for_samples(self, none: NoSamplesError, wait_seconds: float) -> Step:
        """Waits without asking the server for work, which the device cannot do without samples."""
        self._events.emit_no_samples(str(none))
        self._pause = wait_seconds
        return Step.WAITED

    def _handle(self, response: service_pb2.NextAskResponse) -> Step:
        self._session.ask_interrupted = False  # the server offers an interrupted ask again, or has closed it
        match response.WhichOneof("next"):
            case "ask":
                self._events.emit_reason("")
                return self._handle_ask(response.ask)
            case "finished":
                return self._finish(response.finished)
            case _:
                self._pause = pause_seconds(response.come_back, self._session.link.remote)
                self._session.permission.pace.set(self._pause)
                self._events.emit_reason(response.come_back.reason)
                return Step.WAITED

    def _handle_ask(self, ask: service_pb2.Ask) -> Step:
        try:
            result, self._pause = self._handler.handle(ask)
        except (WorkInterrupted, KeyboardInterrupt):
            self._session.ask_interrupted = True
            raise
        return result

    def _finish(self, reason: str) -> Step:
        self._deployer.finish()
        text = plain(reason)
        if not self._deployer.version:
            text += "; no model was delivered to this device, and the run delivers none any more: its operator can "
            text += "continue it with more rounds, or without an end (rounds = 0)"
        self._events.emit("finished", 0, text)
        return Step.FINISHED
