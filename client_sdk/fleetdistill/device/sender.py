"""The answer in the outbox goes to the server until there is a receipt, or a reason why there will be none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fleetdistill.device.events import Events
from fleetdistill.device.session import Session
from fleetdistill.errors import ExportError, FleetDistillError, LinkError, NoRoomError, RefusedError
from fleetdistill.link.terms import beat_seconds, known_compression, plain
from fleetdistill.state import failpoints
from fleetdistill.state.outbox import Outcome, Pending
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code, after_seconds, is_final, status_of
from fleetdistill.wire.compression import RAW, offered
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.device.compute import Compute

_EXPORT_DUE = "model.onnx.due"
_ATTEMPTS_TO_SEND = 5
# gRPC statuses of refusals for other reasons than the answer, which waits in the outbox: no room for it now ...
_RETRY_LATER = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
# ... the server keeps what has come of it and waits for the rest ...
_RESUME = "ABORTED"
# ... or the caller is refused, which ends `Device.run`.
_CALLER_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


class Sender:
    """Settles the answer that is under way, and delivers what its receipt makes the app's.

    Args:
        session: The device.
        events: Events for the app.
        ready_compute: The compute backend with the device's state.
        export_onnx: When the delivered model is exported, as `Device` has it.
    """

    def __init__(
        self, session: Session, events: Events, ready_compute: Callable[[], Compute], export_onnx: str
    ) -> None:
        self._session, self._events, self._storage = session, events, session.storage
        self._ready_compute, self._export_onnx = ready_compute, export_onnx

    def settle(self, pending: Pending) -> None:
        """Brings the answer in the outbox to its end: a receipt, or the reason why there will be none.

        The outcome is stored before anything is done about it, and until the app had its events: at least once.
        Raises LinkError while the disk has no room for that; the server then repeats its reply.
        """
        outcome = self._outcome_of(pending)
        try:
            self._carry_out(outcome)
        except NoRoomError as full:
            self._session.forget_state()  # what of it is on the disk, the next turn finds there
            raise LinkError(f"round {pending.round}: no room to note what the server said: {full}") from full
        self.emit_outcome()

    def _carry_out(self, outcome: Outcome) -> None:
        with self._session.guard.held():
            self._storage.outbox.note_outcome(outcome)
            if outcome.receipt:
                self._promote(outcome.pending)
            else:
                self._drop()

    def emit_outcome(self) -> None:
        """Emits what became of the last answer, if the app had no such events; then exports what that delivered."""
        outcome = self._storage.outbox.outcome()
        if outcome is None:
            return
        self._events.emit_outcome(outcome)
        self._storage.outbox.outcome_reported()
        self.export_due()

    # --- sending

    def _outcome_of(self, pending: Pending) -> Outcome:
        """Sends the answer until the server has decided on it. Raises LinkError while it has not."""
        trouble, damaged = "", 0
        for _ in range(_ATTEMPTS_TO_SEND):
            try:
                receipt = self._send(pending)
                return Outcome(pending, plain(receipt.id, 64), tries=self._storage.outbox.tries)
            except RefusedError as refusal:
                status = status_of(refusal.code)
                if status in _RETRY_LATER:
                    raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal
                if status in _CALLER_REFUSED or refusal.code == Code.UNKNOWN_RUN:
                    raise
                trouble, damaged = str(refusal), damaged + (status != _RESUME)
                if "check_in" in refusal.details:  # a restored server has an earlier profile of the device
                    self._session.terms = None
                if is_final(refusal.code) or damaged == _ATTEMPTS_TO_SEND:
                    details = {**refusal.details, "code": refusal.code}
                    return Outcome(pending, "", refusal.code, str(refusal), details, self._storage.outbox.tries)
        raise LinkError(trouble)

    def _send(self, pending: Pending) -> service_pb2.Receipt:
        """Sends what the server still lacks.

        Raises:
            RefusedError: No receipt; among the reasons are that the ask takes no answer any more (`late`, `closed`) or
                that it has another one (`superseded`).
        """
        name = service_pb2.UploadName(
            round=pending.round,
            step_number=pending.step_number,
            attempt=pending.attempt,
            payload=bytes.fromhex(pending.payload),
        )
        status = self._session.link.upload_status(self._session.identity, name)
        with self._storage.outbox.answer() as payload:
            if status.HasField("receipt"):
                receipt = status.receipt
            elif not status.ask_open:
                raise _closed(pending, status)
            else:
                receipt = self._upload(pending, name, payload, status.next_byte)
            _check_is_for(receipt, pending, payload)
        return receipt

    def _upload(
        self, pending: Pending, name: service_pb2.UploadName, payload: Payload, first_byte: int
    ) -> service_pb2.Receipt:
        header = service_pb2.UploadHeader(
            identity=self._session.identity,
            name=name,
            payload=payload.header(),
            samples=pending.samples,
            first_byte=first_byte,
        )
        terms = self._session.terms
        packed = known_compression(terms.compression, offered()) if terms is not None else RAW
        self._storage.outbox.count_try()
        with self.heartbeats():
            failpoints.hit("device.upload.before-send")
            receipt = self._session.link.upload(header, wire.chunks(payload.source, payload.slots, first_byte, packed))
        failpoints.hit("device.upload.after-receipt")
        return receipt

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Sends heartbeats while this thread computes or sends."""
        if not self._session.link.remote or self._session.terms is None:
            yield
            return
        done = threading.Event()
        seconds = beat_seconds(self._session.terms.heartbeat_seconds)
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
                self._session.link.heartbeat(self._session.identity)

    # --- what comes of it

    def _promote(self, pending: Pending) -> None:
        """The receipt makes the answer's state the device's, and its model the app's if it is replaced."""
        if self._export_onnx == "round" and pending.replacement is not None and pending.replacement.replaced:
            self._storage.save(_EXPORT_DUE, str(pending.round).encode())  # before: a crash must not leave an old file
        self._storage.outbox.promote()
        compute = self._session.compute
        if compute is None:
            return
        if self._session.computed == pending:
            if pending.replacement is not None:
                compute.deliver(pending.replacement)
        else:
            compute.forget_state()  # the answer is an earlier process's; its state is read from the disk

    def _drop(self) -> None:
        """No receipt will come: the state goes back to the last answer that has one."""
        self._storage.outbox.drop()
        self._session.forget_state()

    def export_due(self) -> None:
        """Exports the delivered model where a round has replaced it and the file is still the one of before."""
        number = self._storage.load(_EXPORT_DUE)
        if number is None:
            return
        try:
            if self._export_onnx == "round":
                self.export(int(number) if number.isdigit() else 0)
        except ExportError:
            self._storage.remove(_EXPORT_DUE)  # one error is enough; the next delivered round tries again
            raise
        self._storage.remove(_EXPORT_DUE)

    def export(self, number: int) -> None:
        """Exports the delivered model as that of a round."""
        report = self._ready_compute().export(self._storage.directory / "model.onnx", number)
        self._events.emit_exported(report, number)


def _closed(pending: Pending, status: service_pb2.UploadStatusResponse) -> RefusedError:
    """Why an ask takes no answer any more; a server of 0.1 does not say."""
    text = f"round {pending.round} takes no answer any more"
    said = plain(status.closed_text) or text
    return RefusedError(plain(status.closed_code, 64) or Code.CLOSED, f"{said}; the answer is dropped")


def _check_is_for(receipt: service_pb2.Receipt, pending: Pending, payload: Payload) -> None:
    """A receipt for another attempt, or for other bytes under this one's number, is none for this answer."""
    if not receipt.id:
        raise LinkError(f"round {pending.round}: the server sent a receipt without an id; the answer is sent again")
    if receipt.name.attempt != pending.attempt or receipt.sha256 != payload.sha256:
        known = plain(receipt.id, 64)
        text = f"round {pending.round} has the answer of attempt {receipt.name.attempt}, receipt {known}"
        raise RefusedError(Code.SUPERSEDED, f"{text}; attempt {pending.attempt} is dropped", {"receipt": known})
