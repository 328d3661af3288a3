"""Estimates a device's class shares from its messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleetdistill.knowledge import (
    Array,
    ClassSums,
    Kind,
    ProxyKnowledge,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill_lab.audit.networks import first_step
from fleetdistill_lab.audit.record import Message


def class_shares(messages: Sequence[Message], classes: int) -> Array | None:
    """Estimates a device's class shares `[C]` from its messages; None if nothing in them depends on the shares.

    From the labels or counts that it sent; else from the classes that it last predicted for its own samples, its mean
    prediction for the proxy set in the first message with one, or how far its first local training raised each class's
    bias.
    """
    parts = [part for message in messages for part in message.sent.values()]
    for estimate, ordered in ((_sent, parts), (_predict, parts[::-1]), (_mean_prediction, parts)):
        result = next((one for part in ordered if (one := estimate(part, classes)) is not None), None)
        if result is not None:
            return result
    step = first_step(messages, classes)
    return None if step is None else _normalize(np.maximum(step - np.sort(step)[:3].mean(), 0))


def _sent(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge) and part.labels is not None:
        return _normalize(np.bincount(part.labels, minlength=classes).astype(np.float64))
    if isinstance(part, ClassSums):
        return _normalize(np.maximum(part.counts.astype(np.float64), 0))
    if isinstance(part, SharedStatistics) and part.counts is not None:
        counts = np.zeros(classes)
        counts[part.labels] = part.counts
        return _normalize(counts)
    return None


def _predict(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge) and part.logits is not None:
        return _normalize(np.bincount(part.logits.argmax(axis=1), minlength=classes).astype(np.float64))
    return None


def _mean_prediction(part: Kind, classes: int) -> Array | None:
    if isinstance(part, ProxyKnowledge) and part.logits is not None:
        odds = np.exp(part.logits.astype(np.float64) - part.logits.max(axis=1, keepdims=True))
        return np.asarray((odds / odds.sum(axis=1, keepdims=True)).mean(axis=0))
    return None


def _normalize(shares_c: Array) -> Array:
    total = shares_c.sum()
    return np.asarray(shares_c / total if total > 0 else np.full(len(shares_c), 1 / len(shares_c)))
