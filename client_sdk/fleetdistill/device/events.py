"""The events that an app receives from its device, the lock without which they are emitted, and results of a step."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.errors import FleetDistillError
from fleetdistill.link.terms import plain
from fleetdistill.printable import printable
from fleetdistill.state.files import SetAside
from fleetdistill.state.outbox import Outcome, Pending
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.deployment.versions import Version
    from fleetdistill.privacy.accountant import Guarantee
    from fleetdistill.state.privacy_ledger import PrivacyBudget
    from fleetdistill.training.onnx_file import OnnxReport

logger = logging.getLogger(__name__)

_CALLBACK_FAILED = "callback-failed"
_DROPPED = (Code.LATE, Code.CLOSED, Code.SUPERSEDED, Code.COLUMN_NOT_ALLOWED)


class Step(StrEnum):
    """Result of `Device.step`."""

    ANSWERED = "answered"
    """The server has acknowledged the answer to an ask, also an earlier one."""
    DECLINED = "declined"
    """An ask ended without an answer that counts: the device declined it (event `dropped`), or the server refused the
    answer or did not want it any more (`refused`, `dropped`)."""
    WAITED = "waited"
    """There was no work, or the device must not work now."""
    PAUSED = "paused"
    """The device must not work now, or its work was interrupted. A later step does the work again."""
    FINISHED = "finished"
    """The run is finished."""


@dataclass(frozen=True)
class Event:
    """Progress report from a device to its app, passed to `Device(on_event=...)`.

    Attributes:
        kind: Kind of the event: checked-in, proxy, extractor, ask, asked-again, released, not-released, scored,
            answered, refused, dropped, damaged, kept, delivered, not-copied, not-recorded, exported, not-exported,
            not-quantized, too-large, rolled-back, no-samples, interrupted, waiting, resumed, lost-contact,
            contact-returned, progress, stopped, callback-failed, failed or finished.
        round: Number of the round that the event belongs to, or 0. A round that falls short is repeated under the next
            number, so it can exceed `rounds`.
        text: Description in one sentence.
        values: Counts and figures by name; docs/reference/events.md lists them for each kind.
        rounds: Number of rounds that the run completes; 0 before the check-in, and for a run without an end.
        progress: Completed fraction of the current phase of the work, in [0, 1]; None except for the kind `progress`.
    """

    kind: str
    round: int
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    progress: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class DeviceLock:
    """Lock of a device's compute backend and identity, and the app's event callback, which runs without it. Reentrant.

    A callback that ran while its thread holds the lock, and waited for another thread of the app that reads the model,
    would deadlock. An exception of the callback is logged and reported to it once; only KeyboardInterrupt and
    SystemExit pass.

    Args:
        on_event: Callback of the app, called in the emitting thread.
    """

    def __init__(self, on_event: Callable[[Event], object]) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._queued: list[Event] = []
        self._failures: set[str] = set()
        self.on_event = on_event

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock in the block, then calls the app with the events emitted in the meantime. Reentrant."""
        due: list[Event] = []
        try:
            with self._lock:
                self._holder, self._depth = threading.get_ident(), self._depth + 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    if not self._depth:
                        self._holder, due, self._queued = None, self._queued, []
        finally:
            for event in due:
                self._call(event)

    def emit(self, event: Event) -> None:
        """Calls the app immediately, or when this thread releases the lock."""
        if self._holder == threading.get_ident():
            self._queued.append(event)
        else:
            self._call(event)

    def _call(self, event: Event) -> None:
        try:
            self.on_event(event)
            return
        except (Exception, *CONTROL_FLOW) as error:
            kind, what = type(error).__name__, printable(str(error))
            first = kind not in self._failures  # a callback that fails at each event has one traceback in the log
            self._failures.add(kind)
            text = "on_event failed for the event %r with %s: %s; the device goes on"
            logger.error(text, event.kind, kind, what, exc_info=first)
        if event.kind != _CALLBACK_FAILED:
            text = f"on_event failed for the event {event.kind!r} with {kind}: {what}"
            values = {"event": event.kind, "error": kind}
            self.emit(Event("callback-failed", event.round, text, values, event.rounds))


class Events:
    """Emits events to the app and the log.

    Args:
        lock: Calls the app while no thread holds it.
        device_id: Name of the device, for the log.

    Attributes:
        rounds: Number of rounds of the run, for all further events.
    """

    def __init__(self, lock: DeviceLock, device_id: str) -> None:
        self._lock, self._device_id = lock, device_id
        self.rounds = 0
        self._without_samples = self._without_work = False
        self._reason = ""  # the last reported reason for having no work

    def emit(self, kind: str, number: int, text: str, values: dict[str, Any] | None = None) -> None:
        """Emits an event; `number` is the round, or 0 for an event without a round."""
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: %s", self._device_id, printable(text))
        self._lock.emit(Event(kind, number, text, values or {}, self.rounds))

    def emit_progress(self, ask: service_pb2.Ask, phase: str, fraction: float) -> None:
        """Emits the progress of the work on an ask; logged for debugging only, because there are many."""
        text = f"round {ask.round}: {phase}, {fraction:.0%}"
        logger.debug("%s: %s", self._device_id, text)
        values = {"step": ask.step, "phase": phase, "completed_rounds": ask.completed_rounds}
        self._lock.emit(Event("progress", ask.round, text, values, self.rounds, fraction))

    def emit_checked_in(self, text: str, reveals: str, *, leaves_the_process: bool) -> None:
        """Emits that the device checked in, and logs a warning if answers that leave the process reveal samples."""
        if reveals and leaves_the_process:
            logger.warning("%s: what leaves this device: %s", self._device_id, reveals)
        self.emit("checked-in", 0, text, {"reveals": reveals} if reveals else {})

    def emit_ask(self, ask: service_pb2.Ask) -> None:
        """Emits that work on an ask begins."""
        self._without_samples = False
        if ask.first_attempt > 1:
            text = f"round {ask.round}: the server lost an answer that it had acknowledged, and asks again"
            self.emit("asked-again", ask.round, text, {"first_attempt": ask.first_attempt})
        text = f"round {ask.round}: the server asks for step {plain(ask.step)!r}"
        self.emit("ask", ask.round, text, {"step": ask.step, "completed_rounds": ask.completed_rounds})

    def emit_released(self, number: int, used: Guarantee, spent: float, most: PrivacyBudget) -> None:
        """Emits that noisy statistics were made, and how much of the budget `most` all releases have spent."""
        text = f"round {number}: noisy statistics with epsilon {used.epsilon:g}, delta {used.delta:g}; epsilon"
        values = {"epsilon": used.epsilon, "delta": used.delta, "spent": spent, "budget": most.epsilon}
        self.emit("released", number, f"{text} {spent:.3g} of {most.epsilon:g} is spent", values)

    def emit_not_released(self, run: str) -> None:
        """Emits that new training data are too late for a run that already has what it asks of them once."""
        text = f"run {run!r} has this device's release or its part of a sum, which is final: the fleet does not learn"
        self.emit("not-released", 0, f"{text} from the new data; they count in the next run", {"run": run})

    def emit_outcome(self, outcome: Outcome) -> None:
        """Emits the outcome of an answer, and whether the app's model was replaced."""
        number = outcome.pending.round
        if outcome.receipt:
            self.emit_scores(outcome.pending)
            values = {"receipt": outcome.receipt, "tries": outcome.tries}
            self.emit("answered", number, f"round {number}: receipt {outcome.receipt}", values)
            self._emit_replacement(outcome.pending)
        else:
            kind = "dropped" if outcome.code in _DROPPED else "refused"
            self.emit(kind, number, outcome.text, {**outcome.details, "tries": outcome.tries})

    def emit_put_aside(self, files: list[SetAside]) -> None:
        """Emits each damaged file that was put aside, and empties the list."""
        while files:
            one = files.pop(0)
            self.emit("damaged", 0, one.text, {"path": str(one.path), "kept_as": str(one.kept_as)})

    def emit_scores(self, pending: Pending) -> None:
        """Emits the scores of the round's model on the app's test and validation data."""
        for split, cells in pending.scores.items():
            count = sum(samples for _, _, samples in cells)
            correct = sum(samples for true, predicted, samples in cells if true == predicted)
            accuracy = correct / count if count else math.nan
            values = {"split": split, "accuracy": accuracy, "confusion": cells}
            data, _, model = split.partition("/")
            text = f"round {pending.round}: {accuracy:.1%} on the {data} data{f', {model} model' if model else ''}"
            self.emit("scored", pending.round, text, values)

    def _emit_replacement(self, pending: Pending) -> None:
        """Emits whether the app's model was replaced."""
        replacement = pending.replacement
        if replacement is not None:
            kind = "delivered" if replacement.replaced else "kept"
            self.emit(kind, pending.round, f"round {pending.round}: {replacement.text}", replacement.values)

    def emit_exported(self, report: OnnxReport, version: Version) -> None:
        """Emits that the delivered model was written as ONNX."""
        values = {"path": str(report.path), "max_difference": report.max_difference, "bytes": report.bytes}
        text = f"wrote {report.path.name}; its outputs differ from the model's by at most {report.max_difference:.1e}"
        self.emit("exported", version.round, text, {**values, "version": version.number})

    def emit_not_copied(self, version: Version, error: BaseException) -> None:
        """Emits and logs that a delivered model could not be copied for the app."""
        text = f"version {version.number} of the model could not be copied: {_describe(error)}"
        text += "; predictions go on with the previous copy, and the next delivery tries again"
        self._emit_failure("not-copied", text, version, error)

    def emit_not_recorded(self, version: Version, error: BaseException) -> None:
        """Emits and logs that the disk was full when a version was to be recorded."""
        text = f"version {version.number} of the model could not be recorded: {error}"
        text += "; the device goes on, and the next delivery tries again"
        self._emit_failure("not-recorded", text, version, error)

    def emit_not_exported(self, version: Version, error: BaseException) -> None:
        """Emits and logs that a delivered model could not be written as ONNX."""
        text = f"version {version.number} of the model could not be exported: {_describe(error)}"
        text += "; the previous file remains. Tried again at the next delivery and the next start"
        text += ", and in a minute after an error of the disk"
        self._emit_failure("not-exported", text, version, error)

    def emit_variant_not_exported(self, variant: str, version: Version, error: BaseException) -> None:
        """Emits and logs that a variant which is not in use could not be written as ONNX, unlike the one in use."""
        text = f"variant {variant!r} of version {version.number} could not be exported: {_describe(error)}"
        text += f"; {variant}.onnx is not written, the other files are. Tried again at the next delivery"
        self._emit_failure("not-exported", text, version, error, variant=variant)

    def _emit_failure(self, kind: str, text: str, version: Version, error: BaseException, **values: str) -> None:
        """Emits and logs that something for the app failed; an unknown error with its traceback."""
        known = isinstance(error, (FleetDistillError, OSError))
        logger.warning("%s: %s", self._device_id, printable(text), exc_info=None if known else error)
        details: dict[str, Any] = {"version": version.number, "error": type(error).__name__, **values}
        self._lock.emit(Event(kind, version.round, text, details, self.rounds))

    def emit_failed(self, error: BaseException) -> None:
        """Emits and logs the exception that ended the background thread."""
        text = f"the background thread ended with {_describe(error)}"
        known = isinstance(error, FleetDistillError)  # says itself what is wrong; a traceback would only hide it
        logger.error("%s: %s", self._device_id, text, exc_info=None if known else error)
        self._lock.emit(Event("failed", 0, text, {"error": type(error).__name__}, self.rounds))

    def emit_no_samples(self, text: str) -> None:
        """Emits that the device waits for training samples, once until it has some."""
        if not self._without_samples:
            self.emit("no-samples", 0, text)
        self._without_samples = True

    def emit_no_work(self) -> None:
        """Emits that the run has had no work for a while, once until it has some."""
        if not self._without_work:
            text = "no work for this device at the moment; it keeps asking, and nothing needs to be done"
            self.emit("waiting", 0, text, {"condition": "work"})
        self._without_work = True

    def emit_work(self, *, there_is_some: bool) -> None:
        """Ends what `emit_no_work` began; emits that there is work, unless the run has stopped or is over."""
        if self._without_work and there_is_some:
            self.emit("resumed", 0, "the run has work for this device again", {"condition": "work"})
        self._without_work = False

    def emit_reason(self, reason: str) -> None:
        """Emits the server's reason for having no work, once per reason; empty if there is work."""
        if reason and reason != self._reason:
            self.emit("stopped", 0, f"{plain(reason)}; the device waits")
        self._reason = reason


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {printable(str(error))}"
