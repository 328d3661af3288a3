"""All attacks on the messages of one device. Each scores rows: higher if the device seems to have trained on the row.

Every attack knows the labels of the candidates, the architecture and initial weights of the models, and public rows of
the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fleetdistill.knowledge import (
    KINDS,
    ClassSums,
    Discriminator,
    DistillationGradient,
    Kind,
    ModelParameters,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill_lab.audit.candidates import Attacker, Part, Rows, Scores
from fleetdistill_lab.audit.knowledge import by_features, by_statistics, by_sums
from fleetdistill_lab.audit.networks import by_discriminator, by_gradients, by_parameters
from fleetdistill_lab.audit.record import Message

Attack = Callable[[Sequence[Message], Attacker, Rows], Mapping[Part, Scores]]

_ATTACKS: Mapping[type[Kind], Attack] = {
    ModelParameters: by_parameters,
    DistillationGradient: by_gradients,
    SampleKnowledge: by_features,
    SharedStatistics: by_statistics,
    ClassSums: by_sums,
    Discriminator: by_discriminator,
}
"""Attacks by the kind of part that they attack. The other kinds contain nothing about single rows to ask for."""


def attack(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores rows by every part of a device's messages that can be tested for single rows.

    Args:
        messages: All messages of one device, in order.
        attacker: The attacker's knowledge.
        rows: Candidates.

    Returns:
        Scores by the name of the attacked part and of the attack.
    """
    kinds = {type(part) for message in messages for part in message.sent.values()}
    scores: dict[Part, Scores] = {}
    for fromkey in dict.fromkeys(_ATTACKS[kind] for kind in KINDS.values() if kind in kinds and kind in _ATTACKS):
        scores |= fromkey(messages, attacker, rows)
    return scores


def parts_sent(messages: Sequence[Message]) -> list[str]:
    """Returns the names of all parts that devices sent, in order of their first use."""
    return list(dict.fromkeys(name for message in messages for name in message.sent))


def max_mu(messages: Sequence[Message]) -> float | None:
    """Returns the largest Gaussian-DP parameter of a device's answers; None if an answer is not private."""
    answers = [message.sent for message in messages if message.sent]
    if not answers or not all(isinstance(part, ClassSums) for sent in answers for part in sent.values()):
        return None
    return max(part.mu for sent in answers for part in sent.values() if isinstance(part, ClassSums))


def smallest_batch(messages: Sequence[Message]) -> int | None:
    """Returns the fewest rows of a gradient in the messages; None if there is no gradient."""
    parts = (part for message in messages for part in message.sent.values())
    return min((part.batch_size for part in parts if isinstance(part, DistillationGradient)), default=None)
