"""Counts and metrics of a model on labelled data. Does not import torch, because devices without PyTorch use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleetdistill.knowledge import GENERAL, Array, ClassCount, Metric

__all__ = ["Confusion", "Counts", "place_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """A confusion matrix `[classes, classes]`, kept as its cells that are not zero: at most one for each sample.

    Attributes:
        cells: `[cells, 3]` int64: true class, predicted class and number of samples, in ascending order.
        classes: Number of classes.
    """

    cells: Array
    classes: int

    @classmethod
    def of(cls, labels_n: Array, predictions_n: Array, classes: int) -> Confusion:
        """Returns the matrix of predictions: both arguments are integers `[n]` in `[0, classes)`."""
        samples = np.bincount(np.asarray(labels_n, np.int64) * classes + predictions_n)
        pairs = np.flatnonzero(samples)
        return cls(np.stack([pairs // classes, pairs % classes, samples[pairs]], axis=1), classes)

    @property
    def correct(self) -> int:
        """Number of samples that are classified correctly."""
        return int(self.cells[self.cells[:, 0] == self.cells[:, 1], 2].sum())

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.cells[:, 2].sum())

    @property
    def hits(self) -> Array:
        """Correct samples of each class (TP), `[classes]` int64."""
        right = self.cells[self.cells[:, 0] == self.cells[:, 1]]
        return self._sums(right[:, 0], right[:, 2])

    @property
    def rows(self) -> Array:
        """Samples of each true class (TP + FN), `[classes]` int64."""
        return self._sums(self.cells[:, 0], self.cells[:, 2])

    @property
    def predicted(self) -> Array:
        """Samples of each predicted class (TP + FP), `[classes]` int64."""
        return self._sums(self.cells[:, 1], self.cells[:, 2])

    def _sums(self, of: Array, samples: Array) -> Array:
        result = np.zeros(self.classes, np.int64)
        np.add.at(result, of, samples)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """A model's results on labelled data, as counts that can be summed over devices.

    Attributes:
        correct: Number of samples that are classified correctly.
        count: Number of samples.
        loss_sum: Sum of the cross-entropy over the samples, in nats.
        confusion: Samples by true and predicted class.
    """

    correct: int
    count: int
    loss_sum: float
    confusion: Confusion

    @property
    def accuracy(self) -> float:
        """Share of correct samples in [0, 1]; NaN without samples."""
        return self.correct / self.count if self.count else math.nan


def counts_of(logits_nc: Array, labels_n: Array, classes: int) -> Counts:
    """Returns the results of logits as counts. Ties are resolved in favour of the lowest class index.

    Args:
        logits_nc: Logits `[n, C]`, finite.
        labels_n: Labels `[n]` in `[0, C)`.
        classes: Number of classes C.
    """
    best = logits_nc.argmax(axis=1)
    return Counts(
        correct=int((best == labels_n).sum()),
        count=len(labels_n),
        loss_sum=-likelihood(logits_nc, labels_n),
        confusion=Confusion.of(labels_n, best, classes),
    )


def place_of(split: str, name: str) -> str:
    """Returns the key of a variant's metrics: `split/name`, or `split` for the general variant."""
    return split if name == GENERAL else f"{split}/{name}"


def metrics_of(place: str, counts: Counts, allow: Sequence[str]) -> list[Metric]:
    """Returns the metrics that are sent for a variant's counts; by class only if the app allows `counts`."""
    split, _, name = place.partition("/")
    of = f"{name}/" if name else ""
    result = [
        Metric(name=f"{of}accuracy", split=split, sum=counts.correct, count=counts.count, by_class=_by_class(counts)),
        Metric(name=f"{of}loss", split=split, sum=counts.loss_sum, count=counts.count),
    ]
    return allowed(result, allow)


def allowed(figures: Sequence[Metric], allow: Sequence[str]) -> list[Metric]:
    """Removes counts by class unless the app allows `counts`: they reveal the number of samples per class."""
    return [figure if "counts" in allow else replace(figure, by_class=[]) for figure in figures]


def _by_class(counts: Counts) -> list[ClassCount]:
    pairs = zip(counts.confusion.hits.tolist(), counts.confusion.rows.tolist(), strict=True)
    return [ClassCount(label=label, sum=hit, count=all_) for label, (hit, all_) in enumerate(pairs) if all_]


def likelihood(logits_nc: Array, labels_n: Array) -> float:
    """Returns the sum of the log-probabilities of the rows' labels, in nats."""
    largest = logits_nc.max(axis=1)
    sums = np.log(np.exp(logits_nc - largest[:, None]).sum(axis=1)) + largest
    return float((logits_nc[np.arange(len(labels_n)), labels_n] - sums).sum())
