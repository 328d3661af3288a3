"""Low-rank summaries of a class's features: what devices send once, how they merge, and rows drawn from them.

All in float64 with numpy alone; shapes use n rows, F feature numbers and rank r. A summary stands for the Gaussian
with mean `mean` and covariance `directions.T @ directions + diag(variance)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassStatistics
from fleetdistill.seeds import derive_seed
from fleetdistill.training.portable_noise import portable_noise
from fleetdistill.wire.directions import ROWS_PER_DIRECTION, most_directions

_EPSILON = float(np.finfo(np.float64).eps)
_LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassSummary:
    """What is known of the features of one class.

    Attributes:
        count: Rows behind it, at least 1.
        mean: `[F]` float64.
        directions: `[r, F]` float64, the longest first; rows of zeros where there are fewer.
        variance: `[F]` float64, at least 0: what the directions leave of each feature's variance.
    """

    count: int
    mean: Array
    directions: Array
    variance: Array

    @property
    def diagonal(self) -> Array:
        """`[F]`, the whole variance of each feature."""
        return np.asarray(self.variance + np.square(self.directions).sum(axis=0))


def clip(rows_nf: Array, norm: float) -> Array:
    """Rows scaled down to an L2 norm of at most `norm`, so that one row can move a sum of rows by no more than this.

    Args:
        rows_nf: `[n, F]` float64, finite. Rows that are no longer than `norm` stay as they are, bit for bit.
        norm: Above 0.
    """
    lengths_n1 = np.linalg.norm(rows_nf, axis=1, keepdims=True)
    return np.asarray(rows_nf * (norm / np.maximum(lengths_n1, norm)))


def summarise(rows_nf: Array, rank: int, rows_per_direction: int = ROWS_PER_DIRECTION) -> ClassSummary:
    """Summary of one class's rows, with no more directions than `most_directions` allows.

    Args:
        rows_nf: `[n, F]`, finite, n at least 1.
        rank: Directions wanted, at least 0.
        rows_per_direction: Rows that there must be for each direction, at least 2.

    Raises:
        KnowledgeError: There is no row, or a number is not finite.
    """
    rows_nf = np.asarray(rows_nf, dtype=np.float64)
    if not len(rows_nf) or not np.isfinite(rows_nf).all():
        raise KnowledgeError(f"cannot summarise {len(rows_nf)} rows: there must be one, and every number finite")
    count, mean = len(rows_nf), rows_nf.mean(axis=0)
    scaled_nf = (rows_nf - mean) / np.sqrt(max(count - 1, 1))
    kept = most_directions(rank, count, rows_per_direction)
    directions = _principal(scaled_nf, rank, kept)
    return _complete(count, mean, directions, np.square(scaled_nf).sum(axis=0))


def merge(parts: Sequence[ClassSummary], rank: int) -> ClassSummary:
    """Summary of one class over devices, as if the variance within and between them were one.

    Its diagonal is exactly the pooled one. The order of the devices matters only for rounding.

    Args:
        parts: One summary a device, at least one, all of one F.
        rank: Directions wanted, at least 0.

    Raises:
        KnowledgeError: There is no part.
    """
    if not parts:
        raise KnowledgeError("there is no summary to merge")
    total = sum(part.count for part in parts)
    shares = [part.count / total for part in parts]
    mean = sum((share * part.mean for share, part in zip(shares, parts, strict=True)), np.zeros_like(parts[0].mean))
    stacked = np.concatenate(
        [
            np.sqrt(share) * np.concatenate([part.directions, [part.mean - mean]])
            for share, part in zip(shares, parts, strict=True)
        ]
    )
    within = sum(share * part.variance for share, part in zip(shares, parts, strict=True))
    directions = _principal(stacked, rank, kept=len(stacked))
    return _complete(total, mean, directions, within + np.square(stacked).sum(axis=0))


def length(summary: ClassSummary) -> float:
    """Root mean square L2 norm of the rows that a summary describes."""
    return float(np.sqrt(np.square(summary.mean).sum() + summary.diagonal.sum()))


def shrink(classes: Mapping[int, ClassSummary], share: float) -> dict[int, ClassSummary]:
    """Moves every class's covariance towards the diagonal one that all classes share.

    Args:
        classes: Summaries by label.
        share: The specification's s, in [0, 1); 0 changes nothing.
    """
    if not classes:
        return {}
    total = sum(one.count for one in classes.values())
    pooled = sum(one.count * one.diagonal for one in classes.values()) / total
    return {
        label: ClassSummary(
            count=one.count,
            mean=one.mean,
            directions=np.sqrt(1 - share) * one.directions,
            variance=(1 - share) * one.variance + share * pooled,
        )
        for label, one in classes.items()
    }


def draw(summary: ClassSummary, rows: int, seed: int, *, nonnegative: bool) -> Array:
    """Rows of features from a summary's Gaussian: the same from the same seed, whoever draws them.

    Args:
        summary: Of the class.
        rows: How many, at least 0.
        seed: Of the portable noise, in [0, 2**64).
        nonnegative: Whether features cannot be below 0, as after a ReLU; what is drawn below becomes 0.

    Returns:
        `[rows, F]` float64.
    """
    rank, size = summary.directions.shape
    noise = portable_noise(seed, rows, rank + size).astype(np.float64)
    drawn = summary.mean + noise[:, rank:] * np.sqrt(summary.variance)
    for number in range(rank):  # not a matrix product, whose rounding depends on library and thread count
        drawn += noise[:, number : number + 1] * summary.directions[number]
    return np.maximum(drawn, 0) if nonnegative else np.asarray(drawn)


def draw_classes(
    classes: Mapping[int, ClassSummary], rows: int, seed: int, *, nonnegative: bool
) -> tuple[Array, Array]:
    """Rows of every class, each class from a seed of its own: what a round trains on.

    Args:
        classes: Summaries by label, at least one.
        rows: Rows of each, at least 1.
        seed: The round's.
        nonnegative: As in `draw`.

    Returns:
        `[K * rows, F]` float32 and their labels `[K * rows]` int64, in the order of the labels.
    """
    labels = sorted(classes)
    seeds = {one: derive_seed(seed, "class", one) for one in labels}
    drawn = [draw(classes[one], rows, seeds[one], nonnegative=nonnegative).astype(np.float32) for one in labels]
    return np.concatenate(drawn), np.repeat(np.array(labels, dtype=np.int64), rows)


def without_spread(summary: ClassSummary) -> ClassSummary:
    """The same class without its spread, as a prototype: every row drawn from it is its mean."""
    size = len(summary.mean)
    return replace(summary, directions=np.zeros((0, size)), variance=np.zeros(size))


def to_wire(classes: Mapping[int, ClassSummary], *, variances: bool = True) -> ClassStatistics:
    """Summaries as they travel, in the order of their labels; without `variances` means and directions alone."""
    labels = sorted(classes)
    if not labels:
        return ClassStatistics(labels=[])
    all_of = [classes[label] for label in labels]
    directions = np.stack([one.directions for one in all_of])
    return ClassStatistics(
        labels=labels,
        counts=np.array([min(one.count, _LARGEST_COUNT) for one in all_of], dtype=np.int32),
        means=np.stack([one.mean for one in all_of]),
        directions=directions if directions.shape[1] else None,
        variances=np.stack([one.variance for one in all_of]) if variances else None,
    )


def from_wire(sent: ClassStatistics) -> dict[int, ClassSummary]:
    """Summaries by label; `sent` has passed the checks of whoever took it in, or comes from the server.

    What was not sent, directions or variances, is none.
    """
    if not sent.labels:
        return {}
    assert sent.counts is not None
    assert sent.means is not None
    classes, size = sent.means.shape
    directions = np.zeros((classes, 0, size)) if sent.directions is None else sent.directions.astype(np.float64)
    variances = np.zeros((classes, size)) if sent.variances is None else sent.variances.astype(np.float64)
    return {
        label: ClassSummary(
            count=int(sent.counts[row]),
            mean=sent.means[row].astype(np.float64),
            directions=directions[row],
            variance=variances[row],
        )
        for row, label in enumerate(sent.labels)
    }


def _complete(count: int, mean: Array, directions: Array, diagonal: Array) -> ClassSummary:
    rest = np.maximum(diagonal - np.square(directions).sum(axis=0), 0)
    return ClassSummary(count=count, mean=mean, directions=directions, variance=rest)


def _principal(rows_nf: Array, rank: int, kept: int) -> Array:
    """`[rank, F]`: the rows S_j v_j of a singular value decomposition, no more than `kept` of them, the rest zero.

    By way of the smaller of the two Gram matrices, which is many times quicker than a decomposition of the rows.
    """
    directions = np.zeros((rank, rows_nf.shape[1]))
    count = min(rank, kept, *rows_nf.shape)
    if not count:
        return directions
    wide = len(rows_nf) <= rows_nf.shape[1]
    values, vectors = np.linalg.eigh(rows_nf @ rows_nf.T if wide else rows_nf.T @ rows_nf)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    found = vectors.T @ rows_nf if wide else np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    found[values <= max(rows_nf.shape) * _EPSILON * max(float(values[0]), 0.0)] = 0  # rounding, no direction
    largest = np.abs(found).argmax(axis=1)
    found[found[np.arange(count), largest] < 0] *= -1
    directions[:count] = found
    return directions
