"""Decides whether a round's model replaces the app's model, and reports the decision as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetdistill.knowledge import Metric

__all__ = ["SPLIT", "Replacement"]

SPLIT = "validation"
"""Name of the data split that decides on a replacement."""
REPLACED = "replaced"
"""Metric in the last answer of a round: sum 1 if the app's model is replaced, else 0; count 1."""
REPLACED_BY_RESULT = "replaced_by_result"
"""Metric like `REPLACED`, in the answer to a run's final model; separate because a round can have both."""
PICKED = "picked/"
"""Prefix of a metric per variant, for methods with several: sum 1 if the app's model becomes this variant; count 1."""
REPLACEMENT_METRICS = (REPLACED, REPLACED_BY_RESULT)
"""Names of the metrics that count replacements."""


@dataclass(frozen=True)
class Replacement:
    """Whether the app's model is replaced when the answer that reports the decision has a receipt.

    Attributes:
        replaced: Whether the app's model is replaced. If not, the app keeps its model and training continues.
        accuracy: Accuracy of the round's model on the app's validation data, in [0, 1]; None without such data.
        accuracy_in_use: Accuracy of the app's current model, in [0, 1]; None if the app has no model yet.
        variant: Name of the variant that the app's model becomes; empty if the method has a single variant.
        received: Whether the round's model is the one that the device received, as it was before its training.
        pinned: Whether the app keeps the version that it returned to with `Device.roll_back`; the round's model is then
            stored as a version, and `variant` is that of this version.
    """

    replaced: bool
    accuracy: float | None = None
    accuracy_in_use: float | None = None
    variant: str = ""
    received: bool = False
    pinned: bool = False

    @property
    def text(self) -> str:
        """The decision as one sentence."""
        # One of the variants is the app's own model, so with several variants "replaced" would be wrong.
        new = f"the variant in use is {self.variant!r}" if self.variant else "the app's model is replaced"
        if self.pinned:
            return "the app keeps the version that it returned to, until roll_forward"
        if self.accuracy is None:
            return new
        if self.received and self.replaced:
            new += " by the one that it received, which was better before its training"
        in_use = "none" if self.accuracy_in_use is None else f"{self.accuracy_in_use:.3f}"
        before = f"{self.accuracy:.3f} on validation data, {in_use} before"
        return f"{new if self.replaced else 'the app keeps its model'}: {before}"

    @property
    def values(self) -> dict[str, float | str]:
        """Accuracies and variant for the app's event, without those that are not set."""
        hidden = ("replaced", "answer") if self.pinned else ("replaced",)
        named = {"answer" if name == "variant" else name: value for name, value in asdict(self).items()}
        is_set = {name: value not in (None, "") and value is not False for name, value in named.items()}
        return {name: value for name, value in named.items() if name not in hidden and is_set[name]}

    def metric(self, name: str) -> Metric:
        """Returns the metric for the server; `name` is one of `REPLACEMENT_METRICS`."""
        from fleetdistill.knowledge import Metric  # not needed by an idle device

        return Metric(name=name, split=SPLIT, sum=float(self.replaced), count=1)


def pin(replacement: Replacement, metrics: Iterable[Metric]) -> tuple[Replacement, list[Metric]]:
    """Returns a decision and its metrics for an app that keeps the version that it has returned to."""
    counted = [
        replace(metric, sum=0.0) if metric.name in REPLACEMENT_METRICS or metric.name.startswith(PICKED) else metric
        for metric in metrics
    ]
    return replace(replacement, replaced=False, pinned=True), counted


def judge(
    accuracies: Mapping[str, float], in_use: float | None, max_drop: float = 0.0, received: float | None = None
) -> tuple[str, Replacement]:
    """Returns the best variant of a round, and whether it replaces the app's model.

    Args:
        accuracies: Accuracy of each variant on the app's validation data, by name; among equals the first is best.
        in_use: Accuracy of the app's model; None if the app has no model yet.
        max_drop: How much lower the accuracy of the best variant may be, as in `Deployment(max_accuracy_drop=...)`.
        received: Accuracy of the model that the device received and trained, which is better than the result of the
            training only if its accuracy is higher; None for a method with several variants, or without such a model.
    """
    best = max(accuracies, key=lambda name: accuracies[name])
    from_fleet = received is not None and received > accuracies[best]
    accuracy = received if received is not None and from_fleet else accuracies[best]
    replaced = in_use is None or accuracy >= in_use - max_drop
    variant = best if replaced and len(accuracies) > 1 else ""
    return best, Replacement(replaced, accuracy, in_use, variant, from_fleet)


def picked(names: Iterable[str], replacement: Replacement) -> list[Metric]:
    """Returns the metrics that report which variant the app's model becomes; empty for a single variant."""
    from fleetdistill.knowledge import Metric

    known = list(names)
    return [
        Metric(name=f"{PICKED}{name}", split=SPLIT, sum=float(name == replacement.variant), count=1)
        for name in known
        if len(known) > 1
    ]
