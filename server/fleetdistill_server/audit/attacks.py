"""All attacks on the messages of one device. Each scores rows: higher if the device seems to have trained on the row.

Every attack knows the labels of the candidates, the architecture and initial weights of the models, and public rows of
the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetdistill.knowledge import (
    KINDS,
    Array,
    ClassStatistics,
    Discriminator,
    DistillationGradient,
    Kind,
    ModelParameters,
    ProxyKnowledge,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill_server.audit.candidates import Attacker, Part, Rows, Scores
from fleetdistill_server.audit.knowledge import by_features, by_statistics
from fleetdistill_server.audit.networks import by_discriminator, by_gradients, by_parameters, first_step
from fleetdistill_server.audit.record import Message

Attack = Callable[[Sequence[Message], Attacker, Rows], Mapping[Part, Scores]]

_ATTACKS: Mapping[type[Kind], Attack] = {
    ModelParameters: by_parameters,
    DistillationGradient: by_gradients,
    SampleKnowledge: by_features,
    ClassStatistics: by_statistics,
    SharedStatistics: by_statistics,
    Discriminator: by_discriminator,
}
"""Attacks by the kind of part that they attack. The other kinds contain nothing about single rows to ask for."""


def attack(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores rows by every part of a device's messages that can be asked about a row.

    Args:
        messages: All messages of one device, in order.
        attacker: The attacker's knowledge.
        rows: Candidates.

    Returns:
        Scores by the name of the attacked part and of the attack.
    """
    kinds = {type(part) for message in messages for part in message.sent.values()}
    scores: dict[Part, Scores] = {}
    for one in dict.fromkeys(_ATTACKS[kind] for kind in KINDS.values() if kind in kinds and kind in _ATTACKS):
        scores |= one(messages, attacker, rows)
    return scores


def parts_sent(messages: Sequence[Message]) -> list[str]:
    """Returns the names of all parts that devices sent, in order of their first use."""
    return list(dict.fromkeys(name for message in messages for name in message.sent))


def smallest_batch(messages: Sequence[Message]) -> int | None:
    """Returns the fewest rows of a gradient in the messages; None if there is no gradient."""
    parts = (part for message in messages for part in message.sent.values())
    return min((part.batch_size for part in parts if isinstance(part, DistillationGradient)), default=None)


def class_shares(messages: Sequence[Message], classes: int) -> Array | None:
    """Estimates a device's class shares `[C]` from its messages; None if nothing in them depends on the shares.

    From the labels or counts that it sent; else its mean prediction for the proxy set or its own samples in the first
    message with one; else how far its first local training raised each class's bias.
    """
    for estimate in (_sent_shares, _mean_prediction):
        for message in messages:
            for part in message.sent.values():
                found = estimate(part, classes)
                if found is not None:
                    return found
    step = first_step(messages, classes)
    return None if step is None else _normalized(np.maximum(step - np.sort(step)[:3].mean(), 0))


def _sent_shares(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge) and part.labels is not None:
        return _normalized(np.bincount(part.labels, minlength=classes).astype(np.float64))
    if isinstance(part, ClassStatistics | SharedStatistics) and part.counts is not None:
        counts = np.zeros(classes)
        counts[part.labels] = part.counts
        return _normalized(counts)
    return None


def _mean_prediction(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge | ProxyKnowledge) and part.logits is not None:
        shifted = part.logits.astype(np.float64) - part.logits.max(axis=1, keepdims=True)
        odds = np.exp(shifted)
        return np.asarray((odds / odds.sum(axis=1, keepdims=True)).mean(axis=0))
    return None


def _normalized(shares_c: Array) -> Array:
    total = shares_c.sum()
    return np.asarray(shares_c / total if total > 0 else np.full(len(shares_c), 1 / len(shares_c)))
