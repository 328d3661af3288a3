"""Class statistics with one covariance that all classes share: what a device sends once, and its exact merge.

All in float64 with numpy alone. Letters: n rows, D numbers a row, K classes, r directions. The mathematics is
`docs/reference/methods/classstats.md`; numbers in brackets are its equations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, SharedStatistics
from fleetdistill.wire.directions import LEAST_ROWS_PER_DIRECTION

_LARGEST_COUNT = 2**31 - 1
_LARGEST_STEP = 127


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Moments of rows by class, as one Gaussian for each class with a covariance that all share.

    Attributes:
        labels: The K classes, ascending.
        counts: `[K]` int64, rows of each, at least 1.
        means: `[K, D]` float64.
        covariance: `[D, D]` float64, within classes.
        df: Degrees of freedom behind it: rows less classes, at least 0.
    """

    labels: tuple[int, ...]
    counts: Array
    means: Array
    covariance: Array
    df: int

    @property
    def dimensions(self) -> int:
        """D."""
        return int(self.means.shape[1])


def moments_of(rows_nd: Array, labels_n: Array, min_samples: int = 1) -> Moments:
    """The moments of rows, of the classes that have enough of them (3.3).

    Args:
        rows_nd: `[n, D]`, finite.
        labels_n: `[n]` whole numbers.
        min_samples: Rows that a class must have, at least 1; smaller classes count for nothing.

    Raises:
        KnowledgeError: A number is not finite.
    """
    rows_nd = np.asarray(rows_nd, dtype=np.float64)
    if not np.isfinite(rows_nd).all():
        row = int(np.argwhere(~np.isfinite(rows_nd))[0][0])
        raise KnowledgeError(f"row {row} of the features is not finite; check the data and the extractor")
    found, counts = np.unique(labels_n, return_counts=True)
    enough = counts >= min_samples
    labels = tuple(int(one) for one in found[enough])
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


def most_directions(rank: int, df: int, dimensions: int, rows_per_direction: int = LEAST_ROWS_PER_DIRECTION) -> int:
    """r: directions that a device sends; as many as it has degrees of freedom would span its very rows."""
    return min(rank, df // rows_per_direction, dimensions)


def to_wire(moments: Moments, rank: int, rows_per_direction: int = LEAST_ROWS_PER_DIRECTION) -> SharedStatistics:
    """What a device sends of its moments: means in float16, the largest directions in int8, the rest as a diagonal.

    The diagonal is taken from the directions as their receiver has them, so that the variance of every number arrives
    exactly but for its own rounding (3.3, 3.4).

    Args:
        moments: Of the device.
        rank: R, directions wanted, at least 0.
        rows_per_direction: Degrees of freedom that there must be for each direction, at least 2.

    Raises:
        KnowledgeError: A number does not fit float16.
    """
    if not moments.labels:
        return SharedStatistics(labels=[])
    count = most_directions(rank, moments.df, moments.dimensions, rows_per_direction)
    values, vectors = np.linalg.eigh(moments.covariance)
    largest = np.sqrt(np.maximum(values[::-1][:count], 0))[:, None] * vectors[:, ::-1][:, :count].T
    directions, steps = in_int8(_with_signs(largest))
    sent = directions.astype(np.float64) * steps.astype(np.float64)[:, None]
    rest = np.maximum(np.diag(moments.covariance) - np.square(sent).sum(axis=0), 0)
    return SharedStatistics(
        labels=list(moments.labels),
        counts=np.minimum(moments.counts, _LARGEST_COUNT).astype(np.int32),
        means=_half(moments.means, "means"),
        directions=directions if count else None,
        steps=steps if count else None,
        variances=_half(rest, "variances"),
        df=np.array(min(moments.df, _LARGEST_COUNT), dtype=np.int32),
    )


def from_wire(sent: SharedStatistics) -> Moments:
    """The moments that were sent; `sent` has passed the checks of whoever took it in."""
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
        labels=tuple(sent.labels[one] for one in order),
        counts=sent.counts[order].astype(np.int64),
        means=sent.means[order].astype(np.float64),
        covariance=covariance,
        df=int(sent.df),
    )


def merge(parts: Iterable[Moments]) -> Moments:
    """The moments of all rows together, whatever way they are spread over the parts (3.5).

    One part is in memory at a time. The order of the parts matters only for rounding.

    Raises:
        KnowledgeError: There is no class in any part.
    """
    counts: dict[int, int] = {}
    means: dict[int, Array] = {}
    scatter, df = np.zeros((0, 0)), 0
    for part in (one for one in parts if one.labels):
        scatter = scatter if scatter.size else np.zeros((part.dimensions, part.dimensions))
        scatter += part.df * part.covariance
        df += part.df
        for label, count, mean in zip(part.labels, part.counts.tolist(), part.means, strict=True):
            before, centre = counts.get(label, 0), means.get(label, np.zeros_like(mean))
            away = mean - centre
            scatter += before * count / (before + count) * np.outer(away, away)
            counts[label], means[label] = before + count, centre + away * (count / (before + count))
            df += before > 0  # one class of both parts has one mean instead of two
    if not counts:
        raise KnowledgeError("no part has a class; there is nothing to merge")
    labels = tuple(sorted(counts))
    return Moments(
        labels=labels,
        counts=np.array([counts[one] for one in labels], dtype=np.int64),
        means=np.stack([means[one] for one in labels]),
        covariance=scatter / max(df, 1),
        df=df,
    )


def in_int8(rows_rd: Array) -> tuple[Array, Array]:
    """Rows in 255 steps each: `[r, D]` int8 and `[r]` float16, the size of a step (3.4).

    Raises:
        KnowledgeError: A step does not fit float16.
    """
    steps = _half(np.abs(rows_rd).max(axis=1, initial=0) / _LARGEST_STEP, "directions")
    steps = np.where(steps == 0, np.float16(1), steps)
    whole = np.round(rows_rd / steps.astype(np.float64)[:, None])
    return np.clip(whole, -_LARGEST_STEP, _LARGEST_STEP).astype(np.int8), steps


def _with_signs(rows_rd: Array) -> Array:
    """Each row with the sign that makes its entry of largest magnitude positive."""
    at = np.abs(rows_rd).argmax(axis=1) if len(rows_rd) else np.zeros(0, np.int64)
    negative = rows_rd[np.arange(len(rows_rd)), at] < 0
    return np.where(negative[:, None], -rows_rd, rows_rd)


def _half(numbers: Array, name: str) -> Array:
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float16)
    if not np.isfinite(found).all():
        largest = float(np.abs(numbers).max())
        raise KnowledgeError(f"{name} go up to {largest:g}, float16 to 65504; scale the features down")
    return np.asarray(found)
