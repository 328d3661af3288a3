"""Low-rank Gaussian summaries of a class's features: computing, merging, shrinking and drawing from them.

Computes in float64, with NumPy only. Symbols: n rows, F numbers per row, rank r. A summary is the Gaussian with mean
`mean` and covariance `directions.T @ directions + diag(variance)`. "Line" refers to the section "The mathematics" of
`docs/reference/methods/classstats-averaged.md`.
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
    """A Gaussian summary of one class's features.

    Attributes:
        count: Number of rows that the summary describes, at least 1.
        mean: μ, `[F]` float64.
        directions: U, `[r, F]` float64, longest first; missing directions are rows of zeros.
        variance: d, `[F]` float64, at least 0: each feature's variance that the directions do not explain.
    """

    count: int
    mean: Array
    directions: Array
    variance: Array

    @property
    def diagonal(self) -> Array:
        """Total variance of each feature, `[F]`."""
        return np.asarray(self.variance + np.square(self.directions).sum(axis=0))


def clip(rows_nf: Array, norm: float) -> Array:
    """Returns the rows scaled down to an L2 norm of at most `norm`, which bounds one row's effect on a sum of rows.

    Args:
        rows_nf: `[n, F]` float64, finite. Rows with a norm of at most `norm` are returned unchanged, bit for bit.
        norm: Maximum L2 norm, above 0.
    """
    lengths_n1 = np.linalg.norm(rows_nf, axis=1, keepdims=True)
    return np.asarray(rows_nf * (norm / np.maximum(lengths_n1, norm)))


def summarise(rows_nf: Array, rank: int, rows_per_direction: int = ROWS_PER_DIRECTION) -> ClassSummary:
    """Returns the summary of one class's rows (line `summary`), with at most the directions of `most_directions`.

    Args:
        rows_nf: `[n, F]`, finite, n at least 1.
        rank: Maximum number of directions, at least 0.
        rows_per_direction: Minimum number of rows per direction, at least 2.

    Raises:
        KnowledgeError: There are no rows, or a number is not finite.
    """
    rows_nf = np.asarray(rows_nf, dtype=np.float64)
    if not len(rows_nf) or not np.isfinite(rows_nf).all():
        raise KnowledgeError(f"cannot summarise {len(rows_nf)} rows: at least one row of finite numbers is required")
    count, mean = len(rows_nf), rows_nf.mean(axis=0)
    scaled_nf = (rows_nf - mean) / np.sqrt(max(count - 1, 1))
    kept = most_directions(rank, count, rows_per_direction)
    directions = _principal(scaled_nf, rank, kept)
    return _complete(count, mean, directions, np.square(scaled_nf).sum(axis=0))


def merge(parts: Sequence[ClassSummary], rank: int) -> ClassSummary:
    """Returns the summary of one class over all devices, with the variance within and between devices (line `merge`).

    The diagonal is exactly the pooled one. The order of the devices affects only rounding.

    Args:
        parts: One summary per device, at least one, all with the same F.
        rank: Maximum number of directions, at least 0.

    Raises:
        KnowledgeError: `parts` is empty.
    """
    if not parts:
        raise KnowledgeError("no summary to merge; at least one is required")
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
    """Returns the root mean square L2 norm of the rows that a summary describes."""
    return float(np.sqrt(np.square(summary.mean).sum() + summary.diagonal.sum()))


def shrink(classes: Mapping[int, ClassSummary], share: float) -> dict[int, ClassSummary]:
    """Returns the summaries with each covariance moved towards the diagonal that all classes share (line `shrink`).

    Args:
        classes: Summaries by label.
        share: s, in [0, 1); 0 changes nothing.
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
    """Draws rows of features from a summary's Gaussian (line `draw`); a seed gives the same rows on every device.

    Args:
        summary: Summary of the class.
        rows: Number of rows, at least 0.
        seed: Seed of the portable noise, in [0, 2**64).
        nonnegative: Whether features are at least 0, as after a ReLU; negative numbers then become 0.

    Returns:
        `[rows, F]` float64.
    """
    rank, size = summary.directions.shape
    noise = portable_noise(seed, rows, rank + size).astype(np.float64)
    drawn = summary.mean + noise[:, rank:] * np.sqrt(summary.variance)
    for number in range(rank):  # the rounding of a matrix product would depend on library and thread count
        drawn += noise[:, number : number + 1] * summary.directions[number]
    return np.maximum(drawn, 0) if nonnegative else np.asarray(drawn)


def draw_classes(
    classes: Mapping[int, ClassSummary], rows: int, seed: int, *, nonnegative: bool
) -> tuple[Array, Array]:
    """Draws a round's rows of every class, each class from a separate seed.

    Args:
        classes: Summaries by label, at least one.
        rows: Number of rows of each class, at least 1.
        seed: Seed of the round.
        nonnegative: As in `draw`.

    Returns:
        `[K * rows, F]` float32 and their labels `[K * rows]` int64, in the order of the labels.
    """
    labels = sorted(classes)
    seeds = {one: derive_seed(seed, "class", one) for one in labels}
    drawn = [draw(classes[one], rows, seeds[one], nonnegative=nonnegative).astype(np.float32) for one in labels]
    return np.concatenate(drawn), np.repeat(np.array(labels, dtype=np.int64), rows)


def without_spread(summary: ClassSummary) -> ClassSummary:
    """Returns the summary without directions and variances, as a prototype: every row drawn from it is its mean."""
    size = len(summary.mean)
    return replace(summary, directions=np.zeros((0, size)), variance=np.zeros(size))


def to_wire(classes: Mapping[int, ClassSummary], *, variances: bool = True) -> ClassStatistics:
    """Returns the summaries' wire form, in the order of their labels; without variances if `variances` is False."""
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
    """Returns the summaries of checked statistics, by label.

    Missing directions have rank 0, missing variances are zeros.
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
    """Returns the first `kept` rows S_j v_j of the rows' singular value decomposition, then zeros: `[rank, F]`.

    An eigendecomposition of the smaller Gram matrix is many times faster than a decomposition of the rows.
    """
    directions = np.zeros((rank, rows_nf.shape[1]))
    count = min(rank, kept, *rows_nf.shape)
    if not count:
        return directions
    wide = len(rows_nf) <= rows_nf.shape[1]
    values, vectors = np.linalg.eigh(rows_nf @ rows_nf.T if wide else rows_nf.T @ rows_nf)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    found = vectors.T @ rows_nf if wide else np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    found[values <= max(rows_nf.shape) * _EPSILON * max(float(values[0]), 0.0)] = 0  # only rounding errors
    largest = np.abs(found).argmax(axis=1)
    found[found[np.arange(count), largest] < 0] *= -1
    directions[:count] = found
    return directions
