"""Handles one ask: computes, stores and sends the answer, or declines the ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.consent import check_may_leave
from fleetdistill.device.declines import Declines, send_decline
from fleetdistill.device.events import Events, Step
from fleetdistill.device.private import PrivateAnswers, guarantee_of, private_columns
from fleetdistill.device.sender import Sender
from fleetdistill.device.session import Session
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    DataError,
    FleetDistillError,
    KnowledgeError,
    NoRoomError,
    RefusedError,
    WireError,
    WorkInterrupted,
)
from fleetdistill.interruption import time_limit
from fleetdistill.link.terms import check_ask, upload_digest
from fleetdistill.progress import reported_to
from fleetdistill.replacement import Replacement, pin
from fleetdistill.state.outbox import Pending
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute, Computed
    from fleetdistill.device.preview import Preview
    from fleetdistill.knowledge import Kind
    from fleetdistill.methods.base import Answer, Ask
    from fleetdistill.privacy.guarantee import Guarantee

_TEXTS = {
    "classes_too_small": "none of the device's {} classes has min_samples samples, so no statistics are sent",
    "closed_form_instead": "this device uses the closed form instead of training a predictor",
    "dkd_batch_clipped_to": "the mini-batch has only {} samples, all of the device's data",
    "own_statistics_kept": "the personal model uses the device's own statistics, which are more accurate",
    "participations_differ": "server and device count the device's participations differently",
    "unknown_ids": "{} sample ids from the server are unknown to this device",
}
"""Texts for the app about the counts that a handler adds to an answer (`Answer.notes`)."""


def notes_text(step: str, notes: Mapping[str, int]) -> str:
    """Returns one sentence with all notes that are not 0."""
    texts = [_TEXTS.get(name, name.replace("_", " ") + ": {}").format(count) for name, count in notes.items() if count]
    return f"step {step!r}: {'; '.join(texts)}"


class AskHandler:
    """Handles asks, one at a time.

    Args:
        session: State of the open device.
        events: Emits events to the app.
        check_in: Provides the compute backend and downloads payloads.
        sender: Sends the answer.
        private: Makes the answers of a private run.
        max_seconds: Time limit for one ask, in seconds.
        is_pinned: Returns whether the app keeps the version that it has returned to.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        check_in: CheckIn,
        sender: Sender,
        *,
        private: PrivateAnswers,
        max_seconds: float,
        is_pinned: Callable[[], bool],
    ) -> None:
        self._session = session
        self._events = events
        self._storage = session.storage
        self._check_in, self._sender = check_in, sender
        self._private = private
        self._max_seconds = max_seconds
        self._is_pinned = is_pinned
        self._declines = Declines()

    def handle(self, ask: service_pb2.Ask) -> tuple[Step, float]:
        """Computes and sends the answer to an ask, or declines the ask.

        Returns:
            ANSWERED or DECLINED, and the seconds to wait before the next request for work, above 0 after a repeated
            decline.
        """
        if self._declines.was_declined(ask):
            return self._decline(ask, self._declines.reason)
        try:
            check_ask(ask)
        except WireError as reason:
            return self._decline(ask, reason)
        self._events.emit_ask(ask)
        began = self._session.clock.now()
        try:
            run, device = self._session.identity.run, self._session.identity.device
            with self._session.spans.ask(run=run, round=ask.round, device=device, step=ask.step):
                return self._answer(ask)
        except WorkInterrupted as reason:
            if self._can_resume(ask, reason, self._session.clock.now() - began):
                raise
            return self._decline(ask, reason)

    def _can_resume(self, ask: service_pb2.Ask, reason: WorkInterrupted, elapsed: float) -> bool:
        """Returns whether interrupted work may end before the ask's deadline; an answer in the outbox is kept."""
        if reason.seconds is None or self._storage.outbox.pending() is not None:
            return True
        return reason.seconds < ask.deadline_seconds - elapsed

    def _answer(self, ask: service_pb2.Ask) -> tuple[Step, float]:
        with self._sender.heartbeats():
            try:
                compute = self._check_in.compute_for_ask()
            except CannotAnswer as reason:  # no samples now, or a sample that cannot be used
                return self._decline(ask, reason)
            try:
                with self._session.spans.span("download"):
                    parts = self._download_parts(ask)
                pending, answer = self._compute_answer(compute, ask, parts)
            except _AskClosed as closed:
                self._events.emit("dropped", ask.round, str(closed.refusal), {"code": closed.refusal.code})
                return Step.DECLINED, 0.0
            except (CannotAnswer, ConfigurationError, DataError, KnowledgeError, WireError, NoRoomError) as reason:
                # Training diverged, a sample cannot be read, the server is newer or faulty, or the disk is full: the
                # device declines this ask and continues with the next one.
                return self._decline(ask, reason)
            except BaseException:
                compute.forget_state()  # training for a failed answer must not affect the next one
                raise
        if any(answer.notes.values()):
            self._events.emit("ask", ask.round, notes_text(ask.step, answer.notes), dict(answer.notes))
        return Step.ANSWERED if self._sender.settle(pending) else Step.DECLINED, 0.0

    def preview(self) -> Preview:
        """Computes an answer to an ask like the first one of the run, without storing or sending it.

        Raises:
            ConfigurationError: The method or the worker does not support a preview, or a column is not allowed.
            FleetDistillError: The answer cannot be computed.
        """
        with self._sender.heartbeats():
            compute = self._check_in.ready_compute()
            try:
                return self._preview(compute, compute.first_ask())
            finally:
                self._session.forget_state()  # the next use starts from the committed state

    def _preview(self, compute: Compute, first: Ask) -> Preview:
        from fleetdistill.device.preview import preview_of

        guarantee = guarantee_of(compute.contract)
        allow = self._columns(guarantee)
        ask = service_pb2.Ask(round=first.round, step_number=1, step=first.step, seed=first.seed)
        with time_limit(self._max_seconds, self._session.clock.now):
            answer = compute.answer(ask, first.parts, allow).answer
        if guarantee is not None:
            answer = self._private.sample_answer(answer, guarantee)
        check_may_leave(answer.parts, allow)
        payload = encode(answer.parts, DTYPES[compute.contract.knowledge_type])
        return preview_of(compute.contract, first.step, answer, payload, private=guarantee is not None)

    def _columns(self, guarantee: Guarantee | None) -> tuple[str, ...]:
        """Returns the columns that may leave the device in this run."""
        allow = self._session.consent.columns
        return allow if guarantee is None else private_columns(allow)

    def _download_parts(self, ask: service_pb2.Ask) -> Mapping[str, Kind]:
        """Returns the parts of the ask's payload, by name; empty if the ask has no payload."""
        try:
            return decode(self._check_in.download(ask.payload)) if ask.payload else {}
        except RefusedError as refusal:
            if refusal.code != Code.NOT_FOUND:
                raise
            # The device was too slow and the round is over. It takes part again in the next round.
            raise _AskClosed(refusal) from refusal

    def _compute_answer(
        self, compute: Compute, ask: service_pb2.Ask, parts: Mapping[str, Kind]
    ) -> tuple[Pending, Answer]:
        """Computes the answer and stores it durably, with its state and the decision about the app's model."""
        guarantee = guarantee_of(compute.contract)
        allow = self._columns(guarantee)
        now = self._session.clock.now
        note = partial(self._events.emit_progress, ask.round, ask.step)
        handler = self._session.spans.span("handler", step=ask.step)
        with time_limit(self._max_seconds, now), reported_to(note, now), handler:
            computed = self._session.permission.compute(partial(compute.answer, ask, parts, allow))
        if computed.replacement is not None and computed.replacement.replaced and self._is_pinned():
            computed = _pinned(computed, computed.replacement)
        answer = computed.answer
        if guarantee is not None:
            answer = self._private.private_answer(answer, compute.contract, guarantee, ask.round)
        check_may_leave(answer.parts, allow)  # every answer passes this check
        algorithm = upload_digest(self._session.terms)
        payload = encode(answer.parts, DTYPES[compute.contract.knowledge_type], algorithm)
        # A server that lost an acknowledged answer asks again, with an attempt number above the device's own count.
        attempt = max(self._storage.outbox.next_attempt(ask.round, ask.step_number), ask.first_attempt)
        scores = {split: counts.confusion.tolist() for split, counts in computed.scores.items()}
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
        self._session.computed = pending
        return pending, answer

    def _decline(self, ask: service_pb2.Ask, reason: FleetDistillError) -> tuple[Step, float]:
        """Declines an ask, so that the server closes the ask and does not wait for the deadline.

        A repetition of the same ask is declined without new work.

        Returns:
            DECLINED, and the seconds to wait before the next request for work; they increase with each repetition.
        """
        if self._session.compute is not None:
            self._session.compute.forget_state()
        pause = self._declines.note(ask, reason)
        send_decline(self._session, ask.round, ask.step, ask.step_number, reason)
        if self._declines.is_first_report():
            self._events.emit("dropped", ask.round, str(reason))
        return Step.DECLINED, pause


def _pinned(computed: Computed, replacement: Replacement) -> Computed:
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
