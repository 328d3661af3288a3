"""Handles one ask: computes, stores and sends the answer, or declines the ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fleetdistill.device.backend import Backend
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.consent import check_may_leave
from fleetdistill.device.events import Step
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.private import PrivateAnswers, hides_rows, private_columns
from fleetdistill.device.sender import Sender
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    DataError,
    FleetDistillError,
    KnowledgeError,
    NoRoomError,
    PayloadTooLargeError,
    RefusedError,
    WireError,
    WorkInterrupted,
)
from fleetdistill.interruption import check_may_continue, time_limit
from fleetdistill.link.terms import check_ask, known_compression, upload_digest
from fleetdistill.progress import report_to
from fleetdistill.replacement import Replacement, pin
from fleetdistill.state.outbox import Pending
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import offered
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute, Computed
    from fleetdistill.device.preview import Preview
    from fleetdistill.knowledge import Kind
    from fleetdistill.methods.base import Answer, Ask

_TEXTS = {
    "classes_too_small": "none of the device's {} classes has the run's min_samples rows, so no statistics are sent",
    "closed_form_instead": "this device uses the closed form instead of training a predictor",
    "dkd_batch_clipped_to": "the mini-batch has only {} samples, all of the device's data",
    "own_statistics_kept": "the personal model uses the device's own statistics, which are more accurate",
    "participations_differ": "server and device count the device's participations differently",
    "unknown_ids": "{} sample ids from the server are unknown to this device",
}
"""Texts for the app about the counts that a handler adds to an answer (`Answer.notes`)."""


_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 60.0


def notes_text(step: str, notes: Mapping[str, int]) -> str:
    """Returns one sentence with all notes that are not 0."""
    texts = [_TEXTS.get(name, name.replace("_", " ") + ": {}").format(count) for name, count in notes.items() if count]
    return f"step {step!r}: {'; '.join(texts)}"


class Declines:
    """Stores the last declined ask; a server has at most one open ask per device."""

    def __init__(self) -> None:
        self._ask = b""
        self._times = 0
        self._reported = False
        self.reason = FleetDistillError()

    def was_declined(self, ask: service_pb2.Ask) -> bool:
        """Returns whether this ask was the last declined one."""
        return self._times > 0 and self._ask == _name_of(ask)

    def note(self, ask: service_pb2.Ask, reason: FleetDistillError) -> float:
        """Records a declined ask; returns the seconds to wait afterwards, 0 for the first time."""
        if not self.was_declined(ask):
            self._ask = _name_of(ask)
            self._times = 0
            self._reported = False
            self.reason = reason
        self._times += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(self._times - 2, 10)
        return min(pause, _MAX_PAUSE_SECONDS) if self._times > 1 else 0.0

    def is_first_report(self) -> bool:
        """Returns True on the first call for the current ask, so that the app gets one event."""
        reported, self._reported = self._reported, True
        return not reported


def _name_of(ask: service_pb2.Ask) -> bytes:
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


class AskHandler:
    """Handles asks, one at a time.

    Args:
        parts: What the parts of the open device share.
        check_in: Provides the compute backend.
        backend: Keeps the compute backend and downloads payloads.
        sender: Sends the answer.
        private: Makes the answers of a private run.
        max_seconds: Time limit for one ask, in seconds.
        is_pinned: Returns whether the app keeps the version that it has returned to.
    """

    def __init__(
        self,
        parts: DeviceParts,
        check_in: CheckIn,
        backend: Backend,
        sender: Sender,
        *,
        private: PrivateAnswers,
        max_seconds: float,
        is_pinned: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._storage = parts.storage
        self._check_in = check_in
        self._backend = backend
        self._sender = sender
        self._private = private
        self._max_seconds = max_seconds
        self._is_pinned = is_pinned
        self._declines = Declines()
        self._failed = b""  # name of the ask whose work has ended with an error, and begins again

    def handle(self, ask: service_pb2.Ask, terms: service_pb2.CheckInResponse) -> tuple[Step, float]:
        """Computes and sends the answer to an ask, or declines the ask.

        Args:
            ask: The ask.
            terms: The server's reply to the check-in.

        Returns:
            ANSWERED or DECLINED, and the seconds to wait before the next request for work, above 0 after a repeated
            decline.
        """
        if self._declines.was_declined(ask):
            return self._decline(ask, self._declines.reason, terms)
        try:
            check_ask(ask)
        except WireError as reason:
            return self._decline(ask, reason, terms)
        if self._failed != _name_of(ask):  # else the app knows of it
            self._events.emit_ask(ask)
        self._failed = b""
        began = self._parts.clock.now()
        try:
            run, device = self._parts.identity.run, self._parts.identity.device
            with self._parts.spans.ask(run=run, round=ask.round, device=device, step=ask.step):
                return self._answer(ask, terms)
        except WorkInterrupted as reason:
            if reason.seconds is None or reason.seconds < ask.deadline_seconds - (self._parts.clock.now() - began):
                raise  # it may end before the deadline
            return self._decline(ask, reason, terms)  # an answer in the outbox stays until the server has refused it
        except FleetDistillError:
            self._failed = _name_of(ask)
            raise

    def _answer(self, ask: service_pb2.Ask, terms: service_pb2.CheckInResponse) -> tuple[Step, float]:
        with self._sender.heartbeats(terms):
            try:
                compute = self._check_in.compute_for_ask(terms.contract)
            except (CannotAnswer, PayloadTooLargeError) as reason:  # no usable samples now, or no room for the weights
                return self._decline(ask, reason, terms)
            try:
                with self._parts.spans.span("download"):
                    parts = self._download_parts(ask, terms)
                pending, answer = self._compute_answer(compute, ask, parts, terms)
            except _AskClosed as closed:
                self._events.emit("dropped", ask.round, str(closed.refusal), {"code": closed.refusal.code})
                return Step.DECLINED, 0.0
            except PayloadTooLargeError as reason:  # for the app's limits, also if it has stopped the device
                return self._decline(ask, reason, terms)
            except (CannotAnswer, ConfigurationError, DataError, KnowledgeError, WireError, NoRoomError) as reason:
                # Training diverged, a sample cannot be read, the server is newer or faulty, or the disk is full: the
                # device declines this ask and continues with the next one. If the app has stopped the device, the
                # reason may be the app's end, and the ask stays open.
                check_may_continue()
                return self._decline(ask, reason, terms)
            except BaseException:
                compute.forget_state()  # training for a failed answer must not affect the next one
                raise
        if any(answer.notes.values()):
            self._events.emit("ask", ask.round, notes_text(ask.step, answer.notes), dict(answer.notes))
        return Step.ANSWERED if self._sender.settle(pending, terms) else Step.DECLINED, 0.0

    def preview(self) -> Preview:
        """Computes an answer to an ask like the first one of the run, without storing or sending it.

        Raises:
            ConfigurationError: The method or the worker does not support a preview, or a column is not allowed.
            FleetDistillError: The answer cannot be computed.
        """
        with self._sender.heartbeats(self._check_in.terms):
            compute = self._check_in.ready_compute()
            try:
                return self._preview(compute, compute.first_ask())
            finally:
                self._backend.forget_state()  # the next use starts from the committed state

    def _preview(self, compute: Compute, first: Ask) -> Preview:
        from fleetdistill.device.preview import preview_of

        hidden = hides_rows(compute.contract)
        allow = self._columns(hidden)
        ask = service_pb2.Ask(round=first.round, step_number=1, step=first.step, seed=first.seed)
        with time_limit(self._max_seconds, self._parts.clock.now):
            answer = compute.answer(ask, first.parts, allow).answer
        if hidden:
            answer = self._private.sample_answer(answer, compute.contract)
        check_may_leave(answer.parts, allow)
        payload = encode(answer.parts, DTYPES[compute.contract.knowledge_type])
        return preview_of(compute.contract, first.step, answer, payload)

    def _columns(self, hidden: bool) -> tuple[str, ...]:
        """Returns the columns that may leave the device in this run."""
        allow = self._parts.consent.columns
        return private_columns(allow) if hidden else allow

    def _download_parts(self, ask: service_pb2.Ask, terms: service_pb2.CheckInResponse) -> Mapping[str, Kind]:
        """Returns the parts of the ask's payload, by name; empty if the ask has no payload."""
        try:
            return decode(self._backend.download(ask.payload, terms.contract)) if ask.payload else {}
        except RefusedError as refusal:
            if refusal.code != Code.NOT_FOUND:
                raise
            # The device was too slow and the round is over. It takes part again in the next round.
            raise _AskClosed(refusal) from refusal

    def _compute_answer(
        self, compute: Compute, ask: service_pb2.Ask, parts: Mapping[str, Kind], terms: service_pb2.CheckInResponse
    ) -> tuple[Pending, Answer]:
        """Computes the answer and stores it durably, with its state and the decision about the app's model."""
        hidden = hides_rows(compute.contract)
        allow = self._columns(hidden)
        now = self._parts.clock.now
        note = partial(self._events.emit_progress, ask)
        handler = self._parts.spans.span("handler", step=ask.step)
        with time_limit(self._max_seconds, now) as check_time, report_to(note, now), handler:
            computed = self._parts.permission.compute(partial(compute.answer, ask, parts, allow))
            check_time()  # class statistics are computed in a few steps, without a check between the last ones
        if computed.replacement is not None and computed.replacement.replaced and self._is_pinned():
            computed = _pin(computed, computed.replacement)
        answer = computed.answer
        if hidden:
            from fleetdistill.methods.base import Ask

            received = Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts)
            answer = self._private.private_answer(answer, compute.contract, received)
        check_may_leave(answer.parts, allow)  # every answer passes this check
        algorithm = upload_digest(terms)
        payload = encode(answer.parts, DTYPES[compute.contract.knowledge_type], algorithm)
        self._parts.permission.check_answer(payload, known_compression(terms.compression, offered()))
        # A server that lost an acknowledged answer asks again, with an attempt number above the device's own count.
        attempt = max(self._storage.outbox.next_attempt(ask.round, ask.step_number), ask.first_attempt)
        scores = {split: counts.confusion.cells.tolist() for split, counts in computed.scores.items()}
        pending = Pending(
            round=ask.round,
            step_number=ask.step_number,
            attempt=attempt,
            samples=answer.samples,
            replacement=computed.replacement,
            scores=scores,
            payload=ask.payload.hex(),
            step=ask.step,
            columns={name: list(part.columns()) for name, part in answer.parts.items()},
        )
        self._storage.outbox.put(pending, payload, computed.state, computed.delivered)
        self._backend.note_answer(pending)
        return pending, answer

    def _decline(
        self, ask: service_pb2.Ask, reason: FleetDistillError, terms: service_pb2.CheckInResponse
    ) -> tuple[Step, float]:
        """Declines an ask, so that the server closes the ask and does not wait for the deadline.

        A repetition of the same ask is declined without new work.

        Returns:
            DECLINED, and the seconds to wait before the next request for work; they increase with each repetition.
        """
        if self._backend.compute is not None:
            self._backend.compute.forget_state()
        pause = self._declines.note(ask, reason)
        self._sender.decline(ask.round, ask.step, ask.step_number, reason, terms)
        if self._declines.is_first_report():
            self._events.emit("dropped", ask.round, str(reason))
        return Step.DECLINED, pause


def _pin(computed: Computed, replacement: Replacement) -> Computed:
    """Returns a result whose model is stored, but does not replace the app's."""
    from fleetdistill.knowledge import Metrics

    answer = computed.answer
    metrics = computed.answer.parts.get("metrics")
    replacement, counted = pin(replacement, metrics.metrics if isinstance(metrics, Metrics) else ())
    if counted:
        answer = replace(answer, parts={**answer.parts, "metrics": Metrics(metrics=counted)})
    return replace(computed, answer=answer, replacement=replacement)


class _AskClosed(Exception):
    """The server has deleted the payload of an ask because its round is over."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
