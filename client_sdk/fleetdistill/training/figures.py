"""How a model does on labelled data, and what the server is told of it. No torch: devices without it count alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleetdistill.knowledge import GENERAL, Array, ClassCount, Metric


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """How a model did on labelled data. Counts, not rates, so that devices can be added up.

    Attributes:
        correct: Samples whose best class is their label.
        count: Samples scored.
        loss_sum: Sum of the cross-entropy over the samples.
        confusion: `[classes, classes]` int64: samples of each true class (row) given each class (column).
    """

    correct: int
    count: int
    loss_sum: float
    confusion: Array

    @property
    def accuracy(self) -> float:
        """Share of correct samples, NaN if there were none."""
        return self.correct / self.count if self.count else math.nan

    @property
    def per_class_correct(self) -> Array:
        """`[classes]`, correct samples of each true class (TP)."""
        return self.confusion.diagonal()

    @property
    def per_class_count(self) -> Array:
        """`[classes]`, samples of each true class (TP + FN)."""
        return np.asarray(self.confusion.sum(axis=1))


def counts_of(logits_nc: Array, labels_n: Array, classes: int) -> Counts:
    """The counts of logits; of tied classes the lowest is the answer.

    Args:
        logits_nc: `[n, C]`, finite.
        labels_n: `[n]` in `[0, C)`.
        classes: C.
    """
    best = logits_nc.argmax(axis=1)
    pairs = np.bincount(labels_n * classes + best, minlength=classes**2)
    return Counts(
        correct=int((best == labels_n).sum()),
        count=len(labels_n),
        loss_sum=-likelihood(logits_nc, labels_n),
        confusion=pairs.reshape(classes, classes),
    )


def place_of(split: str, name: str) -> str:
    """Key of an answer's figures: the general one's is the split alone."""
    return split if name == GENERAL else f"{split}/{name}"


def metrics_of(place: str, counts: Counts, allow: Sequence[str]) -> list[Metric]:
    """What the server is told of an answer's counts; by class only where the app allows `counts`."""
    split, _, name = place.partition("/")
    of = f"{name}/" if name else ""
    found = [
        Metric(name=f"{of}accuracy", split=split, sum=counts.correct, count=counts.count, by_class=_by_class(counts)),
        Metric(name=f"{of}loss", split=split, sum=counts.loss_sum, count=counts.count),
    ]
    return allowed(found, allow)


def allowed(figures: Sequence[Metric], allow: Sequence[str]) -> list[Metric]:
    """Without the counts by class where the app keeps these back: they tell how many samples of a class there are."""
    return [one if "counts" in allow else replace(one, by_class=[]) for one in figures]


def _by_class(counts: Counts) -> list[ClassCount]:
    pairs = zip(counts.per_class_correct.tolist(), counts.per_class_count.tolist(), strict=True)
    return [ClassCount(label=label, sum=hit, count=all_) for label, (hit, all_) in enumerate(pairs) if all_]


def likelihood(logits_nc: Array, labels_n: Array) -> float:
    """Sum of the log-probabilities of the rows' own classes, nats."""
    largest = logits_nc.max(axis=1)
    sums = np.log(np.exp(logits_nc - largest[:, None]).sum(axis=1)) + largest
    return float((logits_nc[np.arange(len(labels_n)), labels_n] - sums).sum())
