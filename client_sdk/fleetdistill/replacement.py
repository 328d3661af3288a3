"""Joining must not hurt: whether a round's model becomes the app's, and how the server counts that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleetdistill.knowledge import Metric

SPLIT = "validation"
"""Which data decide on a replacement."""
REPLACED = "replaced"
"""Metric in the last answer of a round: sum 1 where the app's model is replaced, 0 where it is kept; count 1."""
REPLACED_BY_RESULT = "replaced_by_result"
"""The same in the answer to a run's end result. It has a name of its own: both can come in one round."""
PICKED = "picked/"
"""How a metric beside it begins where the round gives several models, with the name of one of them: sum 1 where the
app's model becomes this one; count 1."""
REPLACEMENT_METRICS = (REPLACED, REPLACED_BY_RESULT)


@dataclass(frozen=True)
class Replacement:
    """Whether the app's model is replaced once the answer that reports it has its receipt.

    Attributes:
        replaced: It is; false: the app keeps what it has, and training goes on.
        accuracy: Of the round's model on the app's validation data, in [0, 1]; None without such data.
        accuracy_in_use: Of the app's model until then; None where it had none.
        variant: Name of the variant that the app's model becomes, where the round gives several; else empty.
    """

    replaced: bool
    accuracy: float | None = None
    accuracy_in_use: float | None = None
    variant: str = ""

    @property
    def text(self) -> str:
        """One sentence for a person."""
        # Where there are several variants, the app's model may stay as it is beside the new ones.
        new = f"the answer in use is {self.variant!r}" if self.variant else "the app's model is replaced"
        if self.accuracy is None:
            return new
        in_use = "none" if self.accuracy_in_use is None else f"{self.accuracy_in_use:.3f}"
        before = f"{self.accuracy:.3f} on validation data, {in_use} before"
        return f"{new if self.replaced else 'the app keeps its model'}: {before}"

    @property
    def values(self) -> dict[str, float | str]:
        """Its figures and the variant's name, where there are any, as the app's event has them."""
        return {name: value for name, value in self.saved().items() if name != "replaced" and value not in (None, "")}

    def saved(self) -> dict[str, float | str | None]:
        """As the state directory keeps it, under the names that its format has."""
        return {"answer" if name == "variant" else name: value for name, value in asdict(self).items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Replacement:
        """What `saved` gave. Raises TypeError for other names."""
        found = dict(saved)
        return cls(variant=found.pop("answer", ""), **found)

    def metric(self, name: str) -> Metric:
        """The metric for the server, under a name of `REPLACEMENT_METRICS`."""
        return Metric(name=name, split=SPLIT, sum=float(self.replaced), count=1)


def judge(found: Mapping[str, float], in_use: float | None) -> tuple[str, Replacement]:
    """The best of a round's variants, and whether the app's model becomes it.

    Args:
        found: Accuracy on the app's validation data of each variant, by name; of equals the first is the best.
        in_use: That of the app's model; None where it has none yet.
    """
    best = max(found, key=lambda name: found[name])
    replaced = in_use is None or found[best] >= in_use
    return best, Replacement(replaced, found[best], in_use, best if replaced and len(found) > 1 else "")


def picked(names: Iterable[str], replacement: Replacement) -> list[Metric]:
    """Metrics that say which variant the app's model becomes, where there is a choice."""
    known = list(names)
    return [
        Metric(name=f"{PICKED}{name}", split=SPLIT, sum=float(name == replacement.variant), count=1)
        for name in known
        if len(known) > 1
    ]
