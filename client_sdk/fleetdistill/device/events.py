"""Events for the app, and what a step of the device did."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fleetdistill.device.guard import Guard
from fleetdistill.link.terms import plain
from fleetdistill.printable import printable
from fleetdistill.state.outbox import Outcome, Pending
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.training.onnx_file import OnnxReport

logger = logging.getLogger(__name__)

_DROPPED = (Code.LATE, Code.CLOSED, Code.SUPERSEDED)


class Step(StrEnum):
    """What one `Device.step` did."""

    ANSWERED = "answered"
    WAITED = "waited"
    FINISHED = "finished"


@dataclass(frozen=True)
class Event:
    """Something the app may want to show.

    Attributes:
        kind: checked-in, proxy, extractor, ask, asked-again, scored, answered, refused, dropped, kept, delivered,
            exported, interrupted, lost-contact, stopped or finished.
        round: Round it belongs to, 0 for none.
        text: One sentence.
        values: Counts and figures.
    """

    kind: str
    round: int
    text: str
    values: dict[str, Any] = field(default_factory=dict)


class Events:
    """Reports what happens to the app and the log.

    Args:
        guard: Calls the app when no lock is held.
        device_id: The device's name, for the log.
    """

    def __init__(self, guard: Guard, device_id: str) -> None:
        self._guard, self._device_id = guard, device_id
        self._reason = ""  # why there is nothing to do, as last reported

    def emit(self, kind: str, number: int, text: str, values: dict[str, Any] | None = None) -> None:
        """One event about a round; 0 is none."""
        logger.info("%s: %s", self._device_id, printable(text))
        self._guard.emit(Event(kind, number, text, values or {}))

    def emit_ask(self, ask: service_pb2.Ask) -> None:
        """Work begins."""
        if ask.first_attempt > 1:
            text = f"round {ask.round}: the server has lost the answer that it had acknowledged, and asks again"
            self.emit("asked-again", ask.round, text, {"first_attempt": ask.first_attempt})
        text = f"round {ask.round}: the server asks for step {plain(ask.step)!r}"
        self.emit("ask", ask.round, text, {"step": ask.step, "completed_rounds": ask.completed_rounds})

    def emit_outcome(self, outcome: Outcome) -> None:
        """What became of an answer, and of the app's model with it."""
        number = outcome.pending.round
        if outcome.receipt:
            self.emit_scores(outcome.pending)
            values = {"receipt": outcome.receipt, "tries": outcome.tries}
            self.emit("answered", number, f"round {number}: receipt {outcome.receipt}", values)
            self._emit_replacement(outcome.pending)
        else:
            kind = "dropped" if outcome.code in _DROPPED else "refused"
            self.emit(kind, number, outcome.text, {**outcome.details, "tries": outcome.tries})

    def emit_scores(self, pending: Pending) -> None:
        """How the round's model does on the app's own data."""
        for split, confusion in pending.scores.items():
            correct, count = sum(row[label] for label, row in enumerate(confusion)), sum(map(sum, confusion))
            accuracy = correct / count if count else math.nan
            values = {"split": split, "accuracy": accuracy, "confusion": confusion}
            self.emit("scored", pending.round, f"round {pending.round}: {accuracy:.1%} on {split} data", values)

    def _emit_replacement(self, pending: Pending) -> None:
        """Whether the app's model was replaced."""
        replacement = pending.replacement
        if replacement is not None:
            kind = "delivered" if replacement.replaced else "kept"
            self.emit(kind, pending.round, f"round {pending.round}: {replacement.text}", replacement.values)

    def emit_exported(self, report: OnnxReport, number: int) -> None:
        """The delivered model was written as ONNX."""
        values = {"path": str(report.path), "max_difference": report.max_difference, "bytes": report.bytes}
        text = f"{report.path.name} agrees with the model to {report.max_difference:.1e}"
        self.emit("exported", number, text, values)

    def emit_reason(self, reason: str) -> None:
        """Once, the server's reason why there is nothing to do; empty where there is work."""
        if reason and reason != self._reason:
            self.emit("stopped", 0, f"{plain(reason)}; the device waits")
        self._reason = reason
