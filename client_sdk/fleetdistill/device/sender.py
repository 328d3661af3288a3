"""Sends the answer in the outbox until the server decides on it, commits the result, and sends declines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleetdistill.device.backend import Backend
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.consent import ColumnWithdrawn
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.private import hides_rows, reason_to_send
from fleetdistill.errors import FleetDistillError, LinkError, NoRoomError, RefusedError, WorkInterrupted
from fleetdistill.link.terms import heartbeat_interval, known_compression, plain
from fleetdistill.state import failpoints
from fleetdistill.state.outbox import Outcome, Pending
from fleetdistill.state.sent_ledger import answer_entry, decline_entry
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, with_sha256
from fleetdistill.wire.codes import Code, after_seconds, is_final, status_of
from fleetdistill.wire.compression import offered
from fleetdistill.wire.v1 import service_pb2

MAX_REASON = 512
"""Maximum length of a decline's reason, in characters; the server stores at most as many."""
_NO_ROOM = "the device's disk is full"
_ATTEMPTS_TO_SEND = 5
# gRPC statuses of refusals for reasons other than the answer. The answer stays in the outbox.
# The server cannot accept the answer now.
_RETRY_LATER = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
# The server has received a part of the answer and waits for the rest.
_RESUME = "ABORTED"
# The server refuses the caller, which ends `Device.run`.
_CALLER_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


class Sender:
    """Sends the answer in the outbox, commits its state with the receipt, and delivers and exports the model.

    Args:
        parts: What the parts of the open device share.
        check_in: Checks the device in again if the server requires it.
        backend: Keeps the compute backend, which may hold the state of the answer.
        deployer: Keeps and exports the delivered models.
    """

    def __init__(self, parts: DeviceParts, check_in: CheckIn, backend: Backend, deployer: Deployer) -> None:
        self._parts = parts
        self._events = parts.events
        self._storage = parts.storage
        self._check_in = check_in
        self._backend = backend
        self._deployer = deployer

    def settle(
        self, pending: Pending, terms: service_pb2.CheckInResponse, on_reply: Callable[[], None] = lambda: None
    ) -> bool:
        """Sends the answer in the outbox until it is acknowledged or refused, then commits or drops it.

        The outcome is stored first and kept until its events are emitted, so the app gets each event at least once.

        Args:
            pending: The answer.
            terms: The server's reply to the check-in.
            on_reply: Called when the server has decided, before the events.

        Returns:
            Whether the server has acknowledged the answer.

        Raises:
            LinkError: The server is unavailable, or the disk is full; call again later.
            RefusedError: The server refuses this device.
        """
        outcome = self._send_until_decided(pending, terms)
        on_reply()
        try:
            self._commit(outcome)
        except NoRoomError as full:
            self._backend.forget_state()  # the next step continues from what is on the disk
            raise LinkError(f"round {pending.round}: the server's reply cannot be stored: {full}") from full
        with contextlib.suppress(WorkInterrupted):  # the ask is over: the next turn completes what the app gets
            self.emit_outcome()
        return bool(outcome.receipt)

    def _commit(self, outcome: Outcome) -> None:
        with self._parts.lock.held():
            self._storage.outbox.save_outcome(outcome)
            self._storage.ledger.end_answer(
                self._parts.identity.run, outcome.pending.name, receipt=outcome.receipt, code=outcome.code
            )
            if outcome.receipt:
                self._promote(outcome.pending)
            else:
                self._storage.outbox.drop()
                self._backend.forget_state()  # back to the state of the last acknowledged answer

    def emit_outcome(self) -> None:
        """Emits the outcome of the last answer, unless the app has its events already; then exports a new delivery."""
        outcome = self._storage.outbox.outcome()
        if outcome is None:
            return
        replacement = outcome.pending.replacement if outcome.receipt else None
        if replacement is not None and replacement.replaced:
            self._deployer.use_delivered()
        self._events.emit_outcome(outcome)
        self._storage.outbox.mark_reported()
        self._deployer.settle()
        if replacement is not None:
            self._deployer.check_accuracy(replacement)
            self._deployer.keep_own()

    def decline(
        self, round: int, step: str, step_number: int, reason: FleetDistillError, terms: service_pb2.CheckInResponse
    ) -> None:
        """Declines an ask, after recording the reason in the ledger: it can describe the device's data."""
        text = (reason_to_send(reason) if hides_rows(terms.contract) else str(reason))[:MAX_REASON]
        identity = self._parts.identity
        try:
            self._storage.ledger.record(decline_entry(identity.run, round, step, step_number, text))
        except NoRoomError:
            text = _NO_ROOM  # independent of the data
        self._parts.link.decline(
            service_pb2.DeclineRequest(identity=identity, round=round, step_number=step_number, reason=text)
        )

    # --- sending

    def _send_until_decided(self, pending: Pending, terms: service_pb2.CheckInResponse) -> Outcome:
        """Sends the answer until the server accepts or refuses it. Raises LinkError for a temporary failure."""
        reason, damaged = "", 0
        for _ in range(_ATTEMPTS_TO_SEND):
            try:
                receipt = self._send(pending, terms)
                return Outcome(pending, plain(receipt.id, 64), tries=self._storage.outbox.tries)
            except ColumnWithdrawn as withdrawn:
                self.decline(pending.round, pending.step, pending.step_number, withdrawn, terms)
                code = Code.COLUMN_NOT_ALLOWED
                return Outcome(pending, "", code, str(withdrawn), {"code": code}, self._storage.outbox.tries)
            except RefusedError as refusal:
                status = status_of(refusal.code)
                if status in _RETRY_LATER:
                    raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal
                if status in _CALLER_REFUSED or refusal.code == Code.UNKNOWN_RUN:
                    raise
                reason, damaged = str(refusal), damaged + (status != _RESUME)
                if "check_in" in refusal.details:  # a restored server has an outdated profile of the device
                    self._check_in.forget_terms()
                if is_final(refusal.code) or damaged == _ATTEMPTS_TO_SEND:
                    details = {**refusal.details, "code": refusal.code}
                    return Outcome(pending, "", refusal.code, str(refusal), details, self._storage.outbox.tries)
        raise LinkError(reason)

    def _send(self, pending: Pending, terms: service_pb2.CheckInResponse) -> service_pb2.Receipt:
        """Sends the rest of the answer and returns its receipt.

        Raises:
            RefusedError: The server refuses the answer, for example because the ask is closed (`late`, `closed`) or
                has another answer (`superseded`).
        """
        name = service_pb2.UploadName(
            round=pending.round,
            step_number=pending.step_number,
            attempt=pending.attempt,
            payload=bytes.fromhex(pending.payload),
        )
        status = self._status(name)
        with self._storage.outbox.answer() as stored:
            payload = stored if terms.blake3 else with_sha256(stored)  # another server may have accepted it
            if status.HasField("receipt"):
                receipt = status.receipt
            elif not status.ask_open:
                raise _closed(pending, status)
            else:
                receipt = self._upload(pending, name, payload, status.next_byte, terms)
            _check_receipt(receipt, pending, payload)
        return receipt

    def _status(self, name: service_pb2.UploadName) -> service_pb2.UploadStatusResponse:
        """Returns what the server has of an answer; nothing of a new answer to a server in this process."""
        if self._parts.same_process is not None and not self._storage.outbox.tries:
            return service_pb2.UploadStatusResponse(ask_open=True)
        return self._parts.link.upload_status(self._parts.identity, name)

    def _upload(
        self,
        pending: Pending,
        name: service_pb2.UploadName,
        payload: Payload,
        first_byte: int,
        terms: service_pb2.CheckInResponse,
    ) -> service_pb2.Receipt:
        header = service_pb2.UploadHeader(
            identity=self._parts.identity,
            name=name,
            payload=payload.header(),
            samples=pending.samples,
            first_byte=first_byte,
        )
        self._record(pending, payload)
        packed = known_compression(terms.compression, offered())
        self._storage.outbox.count_try()
        identity = header.identity
        of = {"run": identity.run, "round": pending.round, "device": identity.device, "step": pending.step}
        with self.heartbeats(terms), self._parts.spans.span("upload", **of):
            failpoints.hit("device.upload.before-send")
            if self._parts.same_process is not None:
                receipt = self._parts.same_process.take(header, payload)
            else:
                chunks = wire.chunks(payload.source, payload.slots, first_byte, packed)
                receipt = self._parts.link.upload(header, chunks)
        failpoints.hit("device.upload.after-receipt")
        return receipt

    def _record(self, pending: Pending, payload: Payload) -> None:
        """Records an answer in the ledger. Raises ColumnWithdrawn if the app no longer allows one of its columns."""
        self._parts.consent.check_stored(pending.columns)
        try:
            self._storage.ledger.begin_answer(answer_entry(self._parts.identity.run, pending, payload))
        except NoRoomError as full:
            raise LinkError(f"round {pending.round}: the answer cannot be recorded before it is sent: {full}") from full

    @contextlib.contextmanager
    def heartbeats(self, terms: service_pb2.CheckInResponse | None) -> Iterator[None]:
        """Sends heartbeats from a thread while the block computes or sends, if the device has checked in."""
        if not self._parts.link.remote or terms is None:
            yield
            return
        done = threading.Event()
        seconds = heartbeat_interval(terms.heartbeat_seconds)
        beat = threading.Thread(target=self._beat, args=(done, seconds), daemon=True)
        beat.start()
        try:
            yield
        finally:
            done.set()
            beat.join(timeout=1.0)

    def _beat(self, done: threading.Event, seconds: float) -> None:
        while not done.wait(seconds):
            with contextlib.suppress(FleetDistillError):
                self._parts.link.heartbeat(self._parts.identity)

    # --- commit

    def _promote(self, pending: Pending) -> None:
        """Commits the state of an acknowledged answer, and its model if the app's model is replaced."""
        replaced = pending.replacement is not None and pending.replacement.replaced
        if pending.replacement is not None:
            (self._deployer.announce if replaced else self._deployer.hold)(pending.round, pending.replacement)
        self._storage.outbox.promote(replaced=replaced)
        compute = self._backend.compute
        if compute is None:
            return
        if self._backend.holds_answer(pending):
            if pending.replacement is not None:
                self._deployer.deliver(compute, pending.replacement)
        else:
            compute.forget_state()  # an earlier process computed the answer; the new state is only on the disk


def _closed(pending: Pending, status: service_pb2.UploadStatusResponse) -> RefusedError:
    """Returns the error for an ask that accepts no more answers, with the server's reason if it gives one."""
    reason = plain(status.closed_text) or f"round {pending.round} accepts no more answers"
    return RefusedError(plain(status.closed_code, 64) or Code.CLOSED, f"{reason}; the answer is dropped")


def _check_receipt(receipt: service_pb2.Receipt, pending: Pending, payload: Payload) -> None:
    """Checks that a receipt belongs to this answer.

    Raises:
        LinkError: The receipt has no id.
        RefusedError: The receipt belongs to another attempt or to different bytes.
    """
    if not receipt.id:
        raise LinkError(f"round {pending.round}: the server sent a receipt without an id; the device will retry")
    known = receipt.sha256 == payload.digest or receipt.sha256 == with_sha256(payload).digest
    if receipt.name.attempt != pending.attempt or not known:
        other = plain(receipt.id, 64)
        text = f"round {pending.round} already has an answer, attempt {receipt.name.attempt}, receipt {other}"
        raise RefusedError(Code.SUPERSEDED, f"{text}; attempt {pending.attempt} is dropped", {"receipt": other})
