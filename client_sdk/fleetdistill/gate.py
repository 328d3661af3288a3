"""The gate: what may leave the device is the app's decision, and everything that leaves passes here."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill import knowledge
from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Kind, Parts

_COLUMN_OF: dict[type, str] = {
    knowledge.ModelParameters: "parameters",
    knowledge.Generator: "parameters",
    knowledge.Discriminator: "parameters",
    knowledge.DistillationGradient: "gradients",
    knowledge.WeightedPredictions: "logits",
    knowledge.SoftPredictions: "logits",
    knowledge.Metrics: "metrics",
}
_SEVERAL: dict[type, tuple[str, ...]] = {knowledge.ClassStatistics: ("features", "counts")}
_MAY_LEAVE = (knowledge.SampleKnowledge, knowledge.ProxyKnowledge, *_SEVERAL, *_COLUMN_OF)


def check_may_leave(parts: Parts, allow: Sequence[str]) -> None:
    """Stops an answer that holds a column which the app keeps back.

    Raises:
        ConfigurationError: Names the part and the column; or a part is of a kind that no column lets out.
    """
    for name, kind in parts.items():
        if not isinstance(kind, _MAY_LEAVE):
            raise ConfigurationError(f"part {name!r} is a {type(kind).__name__}, which never leaves; nothing was sent")
        for column in columns_of(kind):
            if column not in allow:
                raise ConfigurationError(f"part {name!r} holds {column}, which the app keeps back; nothing was sent")


def columns_of(kind: Kind) -> tuple[str, ...]:
    """Names of what a part tells about the device."""
    if isinstance(kind, knowledge.SampleKnowledge):
        present = {"features": kind.features, "logits": kind.logits is not None, "labels": kind.labels is not None}
        return tuple(column for column, there in present.items() if there)
    if isinstance(kind, knowledge.ProxyKnowledge):
        present = {"features": kind.embeddings is not None, "logits": kind.logits is not None}
        return tuple(column for column, there in present.items() if there)
    return _SEVERAL.get(type(kind)) or (_COLUMN_OF[type(kind)],)
