"""Private class statistics: the sums that a device releases, with Gaussian noise added on the device.

Letters: n rows, F numbers a row, C classes. "Line" refers to the section "The mathematics" of
`docs/reference/methods/classstats_private.md`. NumPy alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import numpy as np

from fleetdistill.knowledge import Array, ClassSums
from fleetdistill.privacy.discrete_gaussian import Random, discrete_gaussian

__all__ = ["NoiseScale", "RowSums", "from_wire", "unit_rows"]

SHARES = (Fraction(1, 10), Fraction(3, 4), Fraction(3, 20))
"""Shares of mu squared that counts, sums and second moment take."""
_GRID_BITS = 16
"""Exact noise: the numbers of a row are multiples of 2^-16."""
_VARIANCE_BITS = 10
"""Variances of exact noise are rounded up to multiples of 2^-10 grid steps, which keeps the fractions short."""
_FLOAT_GRID = 2.0**-10


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSums:
    """Sums over a device's unit rows (line `sums`).

    Attributes:
        counts: `[C]` float64, rows of each class.
        sums: `[C, F]` float64, sum of each class's rows.
        second_moment: `[F, F]` float64, symmetric: the sum of u uᵀ over the rows of all classes.
    """

    counts: Array
    sums: Array
    second_moment: Array


@dataclass(frozen=True)
class NoiseScale:
    """Standard deviations of one release's noise (line `noise`).

    Attributes:
        counts: Of each count.
        sums: Of each number of a sum.
        second_moment: Of the diagonal; entries beside it have this divided by sqrt(2).
    """

    counts: float
    sums: float
    second_moment: float

    @classmethod
    def of(cls, mu: float) -> Self:
        """Returns 1 / (mu sqrt(share)) for each of the three.

        Args:
            mu: Above 0.
        """
        return cls(*(1 / (mu * math.sqrt(share)) for share in SHARES))


def unit_rows(features_nf: Array) -> Array:
    """Returns rows of length 1; rows of zeros stay zero (line `rows`).

    Args:
        features_nf: `[n, F]`, any float type. A row with a number that is not finite becomes zeros, because an error
            would tell the server about it.

    Returns:
        `[n, F]` float64.
    """
    rows = np.array(features_nf, dtype=np.float64)
    rows[~np.isfinite(rows).all(axis=1)] = 0
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)  # squares of huge numbers overflow
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(np.divide(scaled, length, out=np.zeros_like(rows), where=length > 0))


def on_grid(rows_nf: Array) -> Array:
    """Returns rows with numbers truncated towards zero to multiples of 2^-16; no row becomes longer."""
    grid = 2**_GRID_BITS
    return np.asarray(np.trunc(rows_nf * grid) / grid)


def class_sums(rows_nf: Array, labels_n: Array, classes: int) -> RowSums:
    """Returns the sums over all classes, whether the device has rows of them or not (line `sums`).

    Args:
        rows_nf: `[n, F]` unit rows.
        labels_n: `[n]` integers in [0, classes).
        classes: C.
    """
    sums = np.zeros((classes, rows_nf.shape[1]), dtype=rows_nf.dtype)
    np.add.at(sums, labels_n, rows_nf)
    counts = np.bincount(labels_n, minlength=classes)
    return RowSums(counts=counts.astype(rows_nf.dtype), sums=sums, second_moment=rows_nf.T @ rows_nf)


def release_rounded(sums: RowSums, mu: float, generator: np.random.Generator) -> RowSums:
    """Returns the sums with continuous noise, rounded to multiples of 2^-10 standard deviations (line `noise`).

    Args:
        sums: Of the device; leading axes are independent releases.
        mu: From `accountant.mu_for`.
        generator: Seeded by the operating system, never by the run.
    """
    scale = NoiseScale.of(mu)

    def noisy(values: Array, deviation: float) -> Array:
        step = _FLOAT_GRID * deviation
        return np.round((values + generator.normal(0, deviation, values.shape)) / step) * step

    rows, columns = np.triu_indices(sums.second_moment.shape[-1], 1)
    diagonal = noisy(np.diagonal(sums.second_moment, axis1=-2, axis2=-1), scale.second_moment)
    beside = noisy(sums.second_moment[..., rows, columns], scale.second_moment / math.sqrt(2))
    return RowSums(
        counts=noisy(sums.counts, scale.counts),
        sums=noisy(sums.sums, scale.sums),
        second_moment=_symmetric(diagonal, beside),
    )


def release_exact(rows_nf: Array, labels_n: Array, classes: int, mu: float, random: Random | None = None) -> RowSums:
    """Returns the sums with exact integer noise (line `exact`).

    The rows' numbers are truncated towards zero to multiples of 2^-16, so no row becomes longer than 1. Sums and noise
    are integers until the end.

    Args:
        rows_nf: `[n, F]` unit rows.
        labels_n: `[n]` integers in [0, classes).
        classes: C.
        mu: From `accountant.discrete_mu_for`.
        random: The operating system's generator by default; tests give another.
    """
    grid = 2**_GRID_BITS
    whole = class_sums(np.trunc(rows_nf * grid).astype(np.int64), labels_n, classes)
    variances = [1 / (Fraction(mu) ** 2 * share) for share in SHARES]

    def noisy(values: Array, variance: Fraction, unit: int) -> Array:
        in_steps = rounded_up(variance * unit**2)
        flat = [int(value) + discrete_gaussian(in_steps, random) for value in values.ravel()]
        return np.array([value / unit for value in flat], dtype=np.float64).reshape(values.shape)

    upper = np.triu_indices(rows_nf.shape[1], 1)
    diagonal = noisy(np.diag(whole.second_moment), variances[2], grid**2)
    beside = noisy(whole.second_moment[upper], variances[2] / 2, grid**2)
    return RowSums(
        counts=noisy(whole.counts, variances[0], 1),
        sums=noisy(whole.sums, variances[1], grid),
        second_moment=_symmetric(diagonal, beside),
    )


def to_wire(sums: RowSums, mu: float, *, discrete: bool) -> ClassSums:
    """Returns the wire form of noisy sums, in float32; rounding after the noise costs no privacy."""
    upper = np.triu_indices(len(sums.second_moment))
    return ClassSums(
        counts=sums.counts.astype(np.float32),
        sums=sums.sums.astype(np.float32),
        second_moment=sums.second_moment[upper].astype(np.float32),
        mu=mu,
        discrete=discrete,
    )


def from_wire(sent: ClassSums) -> RowSums:
    """Returns the sums of a checked part, in float64."""
    dimensions = sent.sums.shape[1]
    moment = np.zeros((dimensions, dimensions))
    moment[np.triu_indices(dimensions)] = sent.second_moment
    return RowSums(
        counts=sent.counts.astype(np.float64),
        sums=sent.sums.astype(np.float64),
        second_moment=moment + np.triu(moment, 1).T,
    )


def rounded_up(variance: Fraction) -> Fraction:
    """Returns a variance in grid steps, rounded up to a multiple of 2^-10."""
    return Fraction(math.ceil(variance * 2**_VARIANCE_BITS), 2**_VARIANCE_BITS)


def _symmetric(diagonal: Array, beside: Array) -> Array:
    size = diagonal.shape[-1]
    whole = np.zeros((*diagonal.shape, size))
    rows, columns = np.triu_indices(size, 1)
    whole[..., range(size), range(size)] = diagonal
    whole[..., rows, columns] = whole[..., columns, rows] = beside
    return whole
