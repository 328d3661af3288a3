"""Rows of features as whole numbers that can be summed exactly, and the sum as class statistics.

Letters: n rows, D numbers per row, C classes, g grid bits. A device's numbers are C counts, `[C, D]` sums of the rows
by class, and the upper triangle of the `[D, D]` second moment by rows, in this order. NumPy alone.
"""

from __future__ import annotations

import math

import numpy as np

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import Array, HeadGradient
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, moments_of, to_wire
from fleetdistill.methods.classstats_private.sums import RowSums, unit_rows
from fleetdistill.methods.classstats_secure.noise import local_variances, noise_bound
from fleetdistill.secure.session import PRIVATE, Parameters

__all__ = [
    "decode",
    "exact_numbers",
    "gradient_numbers",
    "gradient_of_sum",
    "limited_numbers",
    "moments_of_sums",
    "rows_in_steps",
    "unit_rows_on_grid",
    "width_for",
]

_EXACT = 2**53
"""Whole numbers below it are exact in float64, whose matrix products are fast."""
_MIN_WIDTH, _MAX_WIDTH = 4, 8


# --- rows


def unit_rows_on_grid(rows_nd: Array, grid_bits: int) -> Array:
    """Returns unit rows in steps of 2^-g, truncated towards zero; none is longer than 2^g steps, exactly.

    A row that rounding left longer is shortened: its first number of largest magnitude moves one step towards zero
    until the row is short enough.

    Args:
        rows_nd: `[n, D]` float64, of `classstats_private.sums.unit_rows`.
        grid_bits: g.

    Returns:
        `[n, D]` int64.
    """
    steps_nd = np.trunc(rows_nd * 2.0**grid_bits).astype(np.int64)
    for row in np.flatnonzero(np.square(steps_nd).sum(axis=1) > 4**grid_bits):
        steps_d = steps_nd[row]  # a view
        while np.square(steps_d).sum() > 4**grid_bits:
            at = np.abs(steps_d).argmax()
            steps_d[at] -= np.sign(steps_d[at])
    return steps_nd


def rows_on_grid(rows_nd: Array, grid_bits: int, clip_bits: int) -> tuple[Array, int]:
    """Returns rows in steps of 2^-g, rounded half to even, with numbers clipped to [-2^clip_bits, 2^clip_bits].

    Args:
        rows_nd: `[n, D]`, finite.
        grid_bits: g.
        clip_bits: log2 of the largest magnitude.

    Returns:
        `[n, D]` int64, and how many numbers were clipped.

    Raises:
        KnowledgeError: A number is not finite.
    """
    rows_nd = np.asarray(rows_nd, dtype=np.float64)
    if not np.isfinite(rows_nd).all():
        row = int(np.argwhere(~np.isfinite(rows_nd))[0][0])
        raise KnowledgeError(f"row {row} of the features is not finite; check the data and the extractor")
    largest = 2.0 ** (grid_bits + clip_bits)
    rounded_nd = np.rint(rows_nd * 2.0**grid_bits)
    clipped_nd = np.clip(rounded_nd, -largest, largest)
    return clipped_nd.astype(np.int64), int((clipped_nd != rounded_nd).sum())


# --- a device's numbers


def exact_numbers(steps_nd: Array, labels_n: Array, classes: int, count_bits: int) -> Array:
    """Returns the sums over all rows, exactly: the sum over devices does not depend on who has which row.

    Args:
        steps_nd: `[n, D]` int64, rows in steps.
        labels_n: `[n]` integers in [0, classes).
        classes: C.
        count_bits: A row counts as 2^count_bits.

    Returns:
        `[C + C D + D (D + 1) / 2]` int64.
    """
    counts_c, sums_cd = _counts_and_sums(steps_nd, labels_n, classes)
    exact = np.square(steps_nd).sum(axis=0).max(initial=0) < _EXACT  # bounds every partial sum
    rows_nd = steps_nd.astype(np.float64) if exact else steps_nd
    moment_dd = (rows_nd.T @ rows_nd).astype(np.int64)
    return _joined(counts_c << count_bits, sums_cd, moment_dd)


def limited_numbers(
    steps_nd: Array,
    labels_n: Array,
    classes: int,
    grid_bits: int,
    *,
    min_samples: int,
    rank: int,
    rows_per_direction: int,
) -> Array:
    """Returns the sums with a second moment limited to what a device without secure sums would send of it.

    Counts and sums are exact. The second moment is that of the rank, the int8 directions and the diagonal of
    `shared_statistics.to_wire`, rounded half to even.

    Args:
        steps_nd: `[n, D]` int64, rows in steps.
        labels_n: `[n]` integers in [0, classes).
        classes: C.
        grid_bits: g.
        min_samples: Minimum number of rows of a class; rows of smaller classes are left out.
        rank: Maximum number of directions.
        rows_per_direction: Minimum degrees of freedom per direction.

    Returns:
        `[C + C D + D (D + 1) / 2]` int64.

    Raises:
        KnowledgeError: A number does not fit float16.
    """
    kept_n = np.bincount(labels_n, minlength=classes)[labels_n] >= min_samples
    steps_nd, labels_n = steps_nd[kept_n], labels_n[kept_n]
    counts_c, sums_cd = _counts_and_sums(steps_nd, labels_n, classes)
    moment_dd = _between(counts_c, sums_cd)
    if len(labels_n):
        sent = from_wire(to_wire(moments_of(steps_nd / 2.0**grid_bits, labels_n), rank, rows_per_direction))
        moment_dd += sent.df * 4.0**grid_bits * sent.covariance
    return _joined(counts_c, sums_cd, np.rint(moment_dd).astype(np.int64))


def gradient_numbers(sent: HeadGradient, parameters: Parameters) -> Array:
    """Returns a device's sums of the gradient in steps of 4^-g, like its second moment, and its number of rows.

    Gradient and loss are limited to 4^clip_bits a row, which no row within the clip exceeds, so that the sum over
    devices fits the width.

    Args:
        sent: The sums, unrounded, `[C, D + 1]`.
        parameters: Of the session, without noise.

    Returns:
        `[C (D + 1) + 2]` int64: the gradient by rows, the loss, the rows.
    """
    largest = sent.rows * 4.0**parameters.clip_bits
    values = np.append(sent.gradient.astype(np.float64).ravel() * sent.scale, sent.loss)
    steps = np.rint(np.clip(values, -largest, largest) * 4.0**parameters.grid_bits).astype(np.int64)
    return np.append(steps, sent.rows)


def gradient_of_sum(total: Array, parameters: Parameters) -> HeadGradient:
    """Returns the sums of the gradient over devices; see `gradient_numbers`."""
    values = total[:-1] / 4.0**parameters.grid_bits
    gradient = values[:-1].reshape(parameters.classes, parameters.dimensions + 1)
    return HeadGradient(gradient=gradient, scale=1.0, loss=float(values[-1]), rows=int(total[-1]))


def _counts_and_sums(steps_nd: Array, labels_n: Array, classes: int) -> tuple[Array, Array]:
    sums_cd = np.zeros((classes, steps_nd.shape[1]), dtype=np.int64)
    np.add.at(sums_cd, labels_n, steps_nd)
    return np.bincount(labels_n, minlength=classes).astype(np.int64), sums_cd


def _between(counts_c: Array, sums_cd: Array) -> Array:
    """Returns sum_c s_c s_c^T / n_c, `[D, D]`, the second moment if each row were its class's mean."""
    means_cd = sums_cd / np.maximum(counts_c, 1)[:, None]
    return np.asarray(means_cd.T @ sums_cd.astype(np.float64))


def _joined(counts_c: Array, sums_cd: Array, moment_dd: Array) -> Array:
    return np.concatenate([counts_c, sums_cd.ravel(), moment_dd[np.triu_indices(len(moment_dd))]])


def rows_in_steps(rows_nd: Array, parameters: Parameters) -> tuple[Array, int]:
    """Returns rows in steps of 2^-g, and how many numbers were clipped: unit rows in a sum with noise.

    Args:
        rows_nd: `[n, D]`, finite.
        parameters: Of the session.

    Returns:
        `[n, D]` int64, and the number of clipped numbers; 0 with noise.

    Raises:
        KnowledgeError: A number is not finite.
    """
    if parameters.mode == PRIVATE:
        return unit_rows_on_grid(unit_rows(rows_nd), parameters.grid_bits), 0
    return rows_on_grid(rows_nd, parameters.grid_bits, parameters.clip_bits)


# --- how many bytes a number takes


def bits_needed(parameters: Parameters) -> int:
    """Returns the bits of a signed number that holds every number of the sum; with noise, but for probability 2^-40.

    `parameters.width` has no influence.
    """
    grid = parameters.grid_bits + parameters.clip_bits
    noise = local_variances(parameters)
    largest: int = max(
        2 ** (parameters.row_bits + bits) + math.ceil(noise_bound(float(parameters.most * variance), parameters))
        for bits, variance in ((parameters.count_bits, noise.counts), (grid, noise.sums), (2 * grid, noise.diagonal))
    )
    return 1 + largest.bit_length()


def width_for(parameters: Parameters) -> int:
    """Returns the bytes of a number, in [4, 8], that hold every number of the sum; `parameters.width` has no influence.

    Raises:
        ConfigurationError: 8 bytes are not enough.
    """
    bits = bits_needed(parameters)
    width = max(_MIN_WIDTH, -(-bits // 8))
    if width > _MAX_WIDTH:
        lower = "grid_bits or row_bits" if parameters.mode == PRIVATE else "grid_bits, clip_bits or row_bits"
        raise ConfigurationError(
            f"the sum's numbers take {bits} bits, at most {8 * _MAX_WIDTH} are possible; lower {lower}"
        )
    return width


# --- the sum


def decode(total: Array, parameters: Parameters) -> RowSums:
    """Returns the sums of a total.

    Args:
        total: `[numbers]` int64, of `primitives.lift`.
        parameters: Of the session.
    """
    classes, dimensions = parameters.classes, parameters.dimensions
    counts_c, sums_cd, upper = np.split(total.astype(np.float64), [classes, classes * (1 + dimensions)])
    moment_dd = np.zeros((dimensions, dimensions))
    moment_dd[np.triu_indices(dimensions)] = upper / 4.0**parameters.grid_bits
    return RowSums(
        counts=counts_c / 2.0**parameters.count_bits,
        sums=sums_cd.reshape(classes, dimensions) / 2.0**parameters.grid_bits,
        second_moment=moment_dd + np.triu(moment_dd, 1).T,
    )


def moments_of_sums(sums: RowSums) -> Moments:
    """Returns the moments of all summed rows, of a sum without noise: S = (M - sum_c s_c s_c^T / n_c) / df."""
    counts_c = np.rint(sums.counts).astype(np.int64)
    labels = np.flatnonzero(counts_c > 0)
    df = int(counts_c[labels].sum()) - len(labels)
    return Moments(
        labels=tuple(labels.tolist()),
        counts=counts_c[labels],
        means=sums.sums[labels] / counts_c[labels, None],
        covariance=(sums.second_moment - _between(counts_c[labels], sums.sums[labels])) / max(df, 1),
        df=df,
    )
