"""The space of a fleet's classes: a few directions in which the covariance within classes is the identity matrix.

The server makes the space from merged moments and sends it once. The nearest class mean in it is linear discriminant
analysis on all D numbers. The fixed random projection of features is equal on every device and in every run, and never
sent. Computes in float64, with NumPy only. Symbols: n rows, D numbers per row, K classes in the
space, q directions, C classes of the run. "Line" refers to the section "The mathematics" of
`docs/reference/methods/classstats.md`. Only `pack_space` and `unpack_space`, for saved state, use torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.training.figures import likelihood
from fleetdistill.training.portable_noise import splitmix64

BELOW_ALL = 20.0
"""Difference between the smallest logit of the space's classes and the logit of a class that is not in the space."""
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Temperatures τ from which a device selects the best one for its personal variant (line `personal`)."""
MIN_SHRINKAGE, MAX_SHRINKAGE = 0.05, 0.5
_PROJECTION_SEED = 1
"""Seed of the projection's signs; equal in all runs, so that statistics are comparable between runs."""
_SMALL_SIDE = 12
_FEW, _USUAL = 256, 384
_RIDGE = 1e-6
_PLAIN = ("labels", "leverage")
"""Fields of a space that are no arrays."""
_SMALLEST_REST = 1e-6  # lower bound of 1 - beta E, which is 0 for a class that consists of one row


def shrinkage_rule(dimensions: int, df: int) -> float:
    """Returns s = D / (4 df), at least 0.05 and at most 0.5 (line `shrink`)."""
    return float(np.clip(dimensions / (4 * max(df, 1)), MIN_SHRINKAGE, MAX_SHRINKAGE))


def shrunk(covariance: Array, share: float, ridge: float = _RIDGE) -> Array:
    """Returns T, the covariance shrunk towards its diagonal (line `shrink`).

    Args:
        covariance: S, `[D, D]`.
        share: s, in [0, 1).
        ridge: Share of the mean variance that is added to every variance, so that T is invertible.

    Returns:
        `[D, D]` float64.
    """
    variances = np.diag(covariance)
    added = share * variances + ridge * variances.mean()
    return np.asarray((1 - share) * covariance + np.diag(added))


def make_space(moments: Moments, shrinkage: float, ridge: float = _RIDGE) -> ClassSpace:
    """Computes the class space of merged moments (line `space`).

    Args:
        moments: Moments of at least two classes.
        shrinkage: s, in [0, 1).
        ridge: As in `shrunk`.

    Returns:
        The space in float64; it is sent in float16.

    Raises:
        KnowledgeError: The moments have fewer than two classes, or no feature varies within a class.
    """
    if len(moments.labels) < 2:
        raise KnowledgeError(f"a class space needs at least two classes, but the moments have {len(moments.labels)}")
    if not np.diag(moments.covariance).any():
        raise KnowledgeError("no feature varies within a class; check the extractor and its inputs")
    values, vectors = np.linalg.eigh(shrunk(moments.covariance, shrinkage, ridge))
    values = np.maximum(values, np.finfo(np.float64).tiny)
    whitening = vectors / np.sqrt(values)
    centre = moments.means.mean(axis=0)
    white = (moments.means - centre) @ whitening
    count = min(len(moments.labels) - 1, moments.dimensions)
    _, _, axes = np.linalg.svd(white - white.mean(axis=0), full_matrices=False)
    directions = _with_signs(whitening @ axes[:count].T)
    origin = centre @ directions
    return ClassSpace(
        labels=list(moments.labels),
        counts=moments.counts.astype(np.int32),
        directions=directions,
        origin=origin,
        centres=moments.means @ directions - origin,
        df=np.array(moments.df, dtype=np.int64),
        shrinkage=np.array(shrinkage, dtype=np.float64),
        outside=np.array(_outside(moments, whitening, directions), dtype=np.float64),
    )


def _outside(moments: Moments, whitening: Array, directions: Array) -> float:
    """Returns ρ, a row's mean squared distance from its class mean in the directions outside the space."""
    whole = np.trace(whitening.T @ moments.covariance @ whitening)
    within = np.trace(directions.T @ moments.covariance @ directions)
    return max(float(whole - within), 0.0) * moments.df / float(moments.counts.sum())


def coordinates(space: ClassSpace, rows_nd: Array) -> Array:
    """Returns the rows' coordinates v = z P - o, `[n, q]` float64."""
    return np.asarray(rows_nd @ space.directions.astype(np.float64) - space.origin.astype(np.float64))


def logits(space: ClassSpace, coordinates_nq: Array, classes: int) -> Array:
    """Returns the general variant's logits, v b_c - |b_c|^2 / 2 (line `general`).

    Args:
        space: The fleet's space.
        coordinates_nq: Coordinates of the rows, from `coordinates`.
        classes: C.

    Returns:
        `[n, C]` float64; a class that is not in the space has the smallest logit.
    """
    centres = space.centres.astype(np.float64)
    result = coordinates_nq @ centres.T - np.square(centres).sum(axis=1) / 2
    return _in_all_classes(result, space.labels, classes)


def leave_one_out(
    space: ClassSpace,
    coordinates_nq: Array,
    labels_n: Array,
    counted: Collection[int],
    classes: int,
    held: float = 1.0,
) -> Array:
    """Returns logits of the device's rows, each left out of the space, as estimates of the logits of unseen rows.

    A rank-one correction removes each row from its class mean and from the covariance. If devices send few directions,
    the covariance contains only a share of the row's outer product, and only that share is removed.

    Args:
        space: The fleet's space.
        coordinates_nq: Coordinates of the rows, from `coordinates`.
        labels_n: Classes of the rows, `[n]`.
        counted: Classes whose rows of this device are in the space.
        classes: C.
        held: Share of a row's outer product that the covariance contains, in (0, 1].

    Returns:
        `[n, C]` float64, minus half the squared distances from the class means. A row whose class is not counted is
        not corrected.
    """
    centres, outside = space.centres.astype(np.float64), float(space.outside)
    place = {label: number for number, label in enumerate(space.labels)}
    own = np.array([place.get(int(label), -1) for label in labels_n], np.int64)  # also without rows
    takes_part = np.isin(labels_n, list(counted)) & (own >= 0)
    count = np.where(takes_part, np.maximum(space.counts[own], 2), 2).astype(np.float64)
    factor = np.where(takes_part, count / (count - 1), 1.0)
    beta = np.where(takes_part, held * (1 - float(space.shrinkage)) * factor / max(int(space.df), 1), 0.0)
    error = coordinates_nq - centres[own]
    whole = np.square(error).sum(axis=1) + outside
    weight = beta / np.maximum(1 - beta * whole, _SMALLEST_REST)
    squares = np.square(coordinates_nq).sum(axis=1)[:, None] - 2 * coordinates_nq @ centres.T
    squares += np.square(centres).sum(axis=1) + outside
    leaning = (whole + (centres[own] * error).sum(axis=1))[:, None] - error @ centres.T
    rows = np.flatnonzero(own >= 0)
    squares[rows, own[rows]] = (whole * factor**2)[rows]
    leaning[rows, own[rows]] = (whole * factor)[rows]
    result = -(squares + weight[:, None] * np.square(leaning)) / 2
    return _in_all_classes(result, space.labels, classes)


def class_prior(labels_n: Array, classes: int) -> Array:
    """Returns the class shares π_c = (n_c + 1/2) / Σ(n_c + 1/2) of the device's rows, `[C]` (line `personal`)."""
    counts = np.bincount(labels_n, minlength=classes) + 0.5
    return np.asarray(counts / counts.sum())


def best_temperature(
    logits_nc: Array, labels_n: Array, prior_c: Array, temperatures: Sequence[float] = TEMPERATURES
) -> float:
    """Returns the temperature that maximises the leave-one-out likelihood of the rows (line `personal`).

    Args:
        logits_nc: Logits of the rows, from `leave_one_out`.
        labels_n: Classes of the rows, `[n]`.
        prior_c: Class shares, from `class_prior`.
        temperatures: The candidates, each above 0.
    """
    return max(temperatures, key=lambda one: likelihood(logits_nc / one + np.log(prior_c), labels_n))


def _in_all_classes(found_nk: Array, labels: list[int], classes: int) -> Array:
    below = found_nk.min(axis=1, keepdims=True) - BELOW_ALL
    everywhere = np.repeat(below, classes, axis=1)
    everywhere[:, labels] = found_nk
    return everywhere


def _with_signs(columns_dq: Array) -> Array:
    """Returns the columns with signs that make each column's entry of largest magnitude positive."""
    largest = np.abs(columns_dq).argmax(axis=0)
    return np.where(columns_dq[largest, np.arange(columns_dq.shape[1])] < 0, -columns_dq, columns_dq)


def copy_space(space: ClassSpace) -> ClassSpace:
    """Returns a copy in memory; the arrays of a received space are mapped from a file that is deleted later."""
    arrays = {name: np.array(value) for name, value in vars(space).items() if name not in _PLAIN}
    return ClassSpace(labels=list(space.labels), leverage=space.leverage, **arrays)


def pack_space(space: ClassSpace) -> dict[str, Any]:
    """Returns a space in the form that `fleetdistill.state.state_file` stores."""
    import torch

    arrays = {name: torch.from_numpy(np.array(value)) for name, value in vars(space).items() if name not in _PLAIN}
    return {"labels": list(space.labels), "leverage": space.leverage, **arrays}


def unpack_space(state: Mapping[str, Any]) -> ClassSpace:
    """Returns the space in a value of `pack_space`."""
    return ClassSpace(**{name: value if name in _PLAIN else value.numpy() for name, value in state.items()})


def usual_dimensions(input_shape: tuple[int, ...]) -> int:
    """Returns the default of D: 256 for images below 12 pixels a side, otherwise 384."""
    small = len(input_shape) == 3 and min(input_shape[1:]) < _SMALL_SIDE
    return _FEW if small else _USUAL


def projection(features: int, dimensions: int) -> Array:
    """Returns G with entries ±1 / √F; bit f·D + d of the random words is the sign of entry (f, d).

    Args:
        features: F, at least 1.
        dimensions: D, at least 1.

    Returns:
        `[F, D]` float32; the identity matrix `[F, F]` if D is at least F.
    """
    if features <= dimensions:
        return np.eye(features, dtype=np.float32)
    count = features * dimensions
    words = splitmix64(_PROJECTION_SEED, (count + 63) // 64)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[:count]
    return np.asarray((2.0 * bits.reshape(features, dimensions) - 1) / np.sqrt(features), dtype=np.float32)


def projection_for(input_shape: tuple[int, ...], features: int) -> Array:
    """Returns the projection G of images of one shape to their default number of dimensions, `[F, D]`."""
    return projection(features, min(usual_dimensions(input_shape), features))
