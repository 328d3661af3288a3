"""Class means with one covariance that all classes share: moments, their wire form, and their exact merge.

Computes in float64, with NumPy only. Symbols: n rows, D numbers per row, K classes, r directions. "Line" refers to the
section "The mathematics" of `docs/reference/methods/classstats.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, SharedStatistics
from fleetdistill.knowledge.statistics import MIN_ROWS_PER_DIRECTION

__all__ = ["Moments", "from_wire"]

_MAX_COUNT = 2**31 - 1
_MAX_STEP = 127


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Moments of rows by class: one Gaussian per class, with a covariance that all classes share.

    Attributes:
        labels: The K classes, ascending.
        counts: Rows of each class, `[K]` int64, at least 1.
        means: Mean of each class, `[K, D]` float64.
        covariance: Covariance within classes, `[D, D]` float64.
        df: Degrees of freedom of the covariance, rows minus classes, at least 0.
    """

    labels: tuple[int, ...]
    counts: Array
    means: Array
    covariance: Array
    df: int

    @property
    def dimensions(self) -> int:
        """D, numbers per row."""
        return int(self.means.shape[1])


def moments_of(rows_nd: Array, labels_n: Array, min_samples: int = 1) -> Moments:
    """Returns the moments of the classes with enough rows (line `device`).

    Args:
        rows_nd: `[n, D]`, finite.
        labels_n: Classes of the rows, `[n]` integers.
        min_samples: Minimum number of rows of a class, at least 1; smaller classes are omitted.

    Raises:
        KnowledgeError: A number is not finite.
    """
    rows_nd = np.asarray(rows_nd, dtype=np.float64)
    if not np.isfinite(rows_nd).all():
        row = int(np.argwhere(~np.isfinite(rows_nd))[0][0])
        raise KnowledgeError(f"row {row} of the features is not finite; check the data and the extractor")
    classes, counts = np.unique(labels_n, return_counts=True)
    enough = counts >= min_samples
    labels = tuple(int(label) for label in classes[enough])
    size = rows_nd.shape[1]
    means, scatter = np.zeros((len(labels), size)), np.zeros((size, size))
    for number, label in enumerate(labels):
        of_class = rows_nd[labels_n == label]
        means[number] = of_class.mean(axis=0)
        centred = of_class - means[number]
        scatter += centred.T @ centred
    df = int(counts[enough].sum()) - len(labels)
    return Moments(
        labels=labels, counts=counts[enough].astype(np.int64), means=means, covariance=scatter / max(df, 1), df=df
    )


def max_directions(rank: int, df: int, dimensions: int, rows_per_direction: int = MIN_ROWS_PER_DIRECTION) -> int:
    """Returns r, the number of directions that a device sends (line `device`).

    If r were equal to the degrees of freedom, the directions would span the rows and so reveal them.
    """
    return min(rank, df // rows_per_direction, dimensions)


def to_wire(moments: Moments, rank: int, rows_per_direction: int = MIN_ROWS_PER_DIRECTION) -> SharedStatistics:
    """Returns the wire form of moments: means in float16, the largest directions in int8, the rest as a diagonal.

    The diagonal is computed from the rounded directions, so that each feature's variance is exact up to the rounding
    of the diagonal itself (line `device`).

    Args:
        moments: The device's moments.
        rank: R, maximum number of directions, at least 0.
        rows_per_direction: Minimum degrees of freedom per direction, at least 2.

    Raises:
        KnowledgeError: A number does not fit float16.
    """
    if not moments.labels:
        return SharedStatistics(labels=[])
    count = max_directions(rank, moments.df, moments.dimensions, rows_per_direction)
    values, vectors = np.linalg.eigh(moments.covariance)
    largest = np.sqrt(np.maximum(values[::-1][:count], 0))[:, None] * vectors[:, ::-1][:, :count].T
    directions, steps = in_int8(_with_signs(largest))
    sent = directions.astype(np.float64) * steps.astype(np.float64)[:, None]
    rest = np.maximum(np.diag(moments.covariance) - np.square(sent).sum(axis=0), 0)
    return SharedStatistics(
        labels=list(moments.labels),
        counts=np.minimum(moments.counts, _MAX_COUNT).astype(np.int32),
        means=in_float16(moments.means, "means"),
        directions=directions if count else None,
        steps=steps if count else None,
        variances=in_float16(rest, "variances"),
        df=np.array(min(moments.df, _MAX_COUNT), dtype=np.int32),
    )


def from_wire(sent: SharedStatistics) -> Moments:
    """Returns the moments of checked statistics."""
    if not sent.labels:
        return Moments(
            labels=(), counts=np.zeros(0, np.int64), means=np.zeros((0, 0)), covariance=np.zeros((0, 0)), df=0
        )
    assert sent.counts is not None
    assert sent.means is not None
    assert sent.variances is not None
    assert sent.df is not None
    covariance = np.diag(sent.variances.astype(np.float64))
    if sent.directions is not None and sent.steps is not None:
        rows = sent.directions.astype(np.float64) * sent.steps.astype(np.float64)[:, None]
        covariance += rows.T @ rows
    order = np.argsort(sent.labels)
    return Moments(
        labels=tuple(sent.labels[item] for item in order),
        counts=sent.counts[order].astype(np.int64),
        means=sent.means[order].astype(np.float64),
        covariance=covariance,
        df=int(sent.df),
    )


def merge(parts: Iterable[Moments]) -> Moments:
    """Returns the moments of all rows together (line `merge`); their distribution over the parts has no effect.

    One part is in memory at a time. The order of the parts affects only rounding.

    Raises:
        KnowledgeError: No part has a class.
    """
    counts: dict[int, int] = {}
    means: dict[int, Array] = {}
    scatter, df = np.zeros((0, 0)), 0
    for part in (part for part in parts if part.labels):
        scatter = scatter if scatter.size else np.zeros((part.dimensions, part.dimensions))
        scatter += part.df * part.covariance
        df += part.df
        for label, count, mean in zip(part.labels, part.counts.tolist(), part.means, strict=True):
            before, centre = counts.get(label, 0), means.get(label, np.zeros_like(mean))
            away = mean - centre
            scatter += before * count / (before + count) * np.outer(away, away)
            counts[label], means[label] = before + count, centre + away * (count / (before + count))
            df += before > 0  # the class has one mean after the merge, and had two before
    if not counts:
        raise KnowledgeError("no part has a class, so there is nothing to merge")
    labels = tuple(sorted(counts))
    return Moments(
        labels=labels,
        counts=np.array([counts[label] for label in labels], dtype=np.int64),
        means=np.stack([means[label] for label in labels]),
        covariance=scatter / max(df, 1),
        df=df,
    )


def in_int8(rows_rd: Array) -> tuple[Array, Array]:
    """Quantises each row to 255 levels.

    Args:
        rows_rd: `[r, D]`, finite.

    Returns:
        Levels `[r, D]` int8, and the size of a level for each row, `[r]` float16.

    Raises:
        KnowledgeError: The size of a level is out of float16's range.
    """
    steps = in_float16(np.abs(rows_rd).max(axis=1, initial=0) / _MAX_STEP, "directions")
    steps = np.where(steps == 0, np.float16(1), steps)
    whole = np.round(rows_rd / steps.astype(np.float64)[:, None])
    return np.clip(whole, -_MAX_STEP, _MAX_STEP).astype(np.int8), steps


def _with_signs(rows_rd: Array) -> Array:
    """Returns the rows with signs that make each row's entry of largest magnitude positive."""
    at = np.abs(rows_rd).argmax(axis=1) if len(rows_rd) else np.zeros(0, np.int64)
    negative = rows_rd[np.arange(len(rows_rd)), at] < 0
    return np.where(negative[:, None], -rows_rd, rows_rd)


def in_float16(numbers: Array, name: str) -> Array:
    """Returns the numbers in float16.

    Args:
        numbers: Any shape, finite.
        name: What they are, for the error.

    Raises:
        KnowledgeError: A number does not fit float16.
    """
    with np.errstate(over="ignore"):
        result = numbers.astype(np.float16)
    if not np.isfinite(result).all():
        largest = float(np.abs(numbers).max())
        raise KnowledgeError(f"{name} reach {largest:g}, but float16 holds at most 65504; scale the features down")
    return np.asarray(result)
