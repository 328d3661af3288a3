"""Merges noisy sums into one Gaussian per class, knowing how large the noise is.

Everything here is post-processing of what the devices released and costs no privacy. NumPy only. "Line" refers to the
section "The mathematics" of `docs/reference/methods/classstats_private.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats_private.sums import NoiseScale, RowSums

__all__ = ["much_noise", "other_dimensions", "strength", "too_few_rows"]

ENOUGH = 350.0
"""Strength of a fleet's statistics from which accuracy is within about 10 points of that without noise."""
TOO_LITTLE = 150.0
"""Strength below which the merge is mostly noise."""
_DIMENSIONS = ((1000.0, 192), (ENOUGH, 128), (0.0, 64))
"""Strengths from which so many whitened features were the most accurate on Fashion-MNIST and MNIST together."""
_SMALLEST_EIGENVALUE = 1e-6
"""Of the merged covariance, as a share of its largest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateMoments:
    """Class means and one covariance of all classes, estimated from noisy sums.

    Attributes:
        labels: `[K]` classes whose count stands out from the noise, ascending; K of C.
        counts: `[K]` float64, estimated rows of each, weighted.
        means: `[K, F]` float64.
        covariance: `[F, F]` float64, within classes, positive definite.
        noise_variances: `[K]` tau², the noise's variance in each number of a mean.
        sizes: `[devices]` noisy number of rows of each device.
        floor: Smallest eigenvalue that the noise allows to tell from zero.
    """

    labels: Array
    counts: Array
    means: Array
    covariance: Array
    noise_variances: Array
    sizes: Array
    floor: float


def strength(rows: float, mus: Sequence[float]) -> float:
    """Returns R = sqrt(K) n mu of K devices with n rows each, which predicts the loss of accuracy (line `strength`).

    Args:
        rows: n, mean number of rows of a device.
        mus: Gaussian-DP parameter of each device's noise.
    """
    return rows * math.sqrt(sum(mu * mu for mu in mus))


def rows_needed(devices: int, mu: float, wanted: float = ENOUGH) -> int:
    """Returns the number of rows a device that gives a strength of `wanted`."""
    return math.ceil(wanted / (math.sqrt(devices) * mu))


def much_noise(found: float) -> list[str]:
    """Returns a warning if the strength `found` is below `ENOUGH`; empty otherwise."""
    if found >= ENOUGH:
        return []
    text = f"the strength of the fleet's statistics is {found:.0f}, below {ENOUGH:.0f}: expect 7 to 21 points"
    return [f"{text} less accuracy than without noise; use more rows or devices, or a larger epsilon"]


def recommended_dimensions(found: float) -> int:
    """Returns the number of whitened features for a strength: 64, from 350 128, from 1,000 192 (line `numbers`).

    More features describe the classes better, and each has the same noise.

    Args:
        found: R, at least 0.
    """
    return next(count for least, count in _DIMENSIONS if found >= least)


def other_dimensions(found: float, features: str, dimensions: int) -> list[str]:
    """Returns a sentence if `recommended_dimensions` has another number than a run; empty otherwise.

    Args:
        found: R, at least 0.
        features: The run's setting; nothing is recommended for the outputs of the run's own extractor.
        dimensions: The run's setting; below 64 it counts as 64, the smallest number that was measured.
    """
    best = recommended_dimensions(found)
    if features != SCATTERING or best == max(dimensions, _DIMENSIONS[-1][1]):
        return []
    text = f"the strength of the fleet's statistics is {found:,.0f}: dimensions = {best} is usually more accurate"
    return [f"{text} than {dimensions}"]


def precisions(mus: Sequence[float]) -> Array:
    """Returns each release's weight, (mu / largest mu)^2: inverse to its noise's variance, as `strength` assumes."""
    squares = np.square(np.array(mus))
    return np.asarray(squares / squares.max())


def too_few_rows(rows: float, devices: int, mu: float, epsilon: float) -> str | None:
    """Returns why a fleet's rows are too few for the noise, or None if they suffice."""
    result = strength(rows, [mu] * devices)
    if result >= TOO_LITTLE:
        return None
    return (
        f"{rows:,.0f} rows on each of {devices} devices are too few for the noise at epsilon {epsilon:g}; use at least "
        f"{rows_needed(devices, mu, TOO_LITTLE):,} rows a device, better {rows_needed(devices, mu):,}, more devices, "
        "or a larger epsilon"
    )


def merge_private(parts: Sequence[RowSums], scales: Sequence[NoiseScale]) -> PrivateMoments | None:
    """Merges the devices' noisy sums; the order of the devices matters only for rounding.

    Args:
        parts: At least one device's release.
        scales: The noise of each.

    Returns:
        The moments; None if no class has more rows than the noise has.
    """
    counts_kc = np.stack([part.counts for part in parts])
    noise_k = np.array([scale.counts for scale in scales])
    weights_kc = _weights(counts_kc, noise_k)
    n_c = (weights_kc * counts_kc).sum(axis=0)
    kept = n_c > 2 * np.sqrt((np.square(weights_kc) * np.square(noise_k)[:, None]).sum(axis=0))
    if not kept.any():
        return None
    sums_cf = sum(w_c[:, None] * part.sums for w_c, part in zip(weights_kc, parts, strict=True))
    sums_noise_k = np.array([scale.sums for scale in scales])
    n_c = np.maximum(n_c, 1)
    means_cf = sums_cf / n_c[:, None]
    tau2_c = (np.square(weights_kc) * np.square(sums_noise_k)[:, None]).sum(axis=0) / np.square(n_c)
    covariance, floor = _covariance(parts, scales, counts_kc, means_cf, tau2_c)
    centre_f = sums_cf[kept].sum(axis=0) / n_c[kept].sum()
    return PrivateMoments(
        labels=np.flatnonzero(kept),
        counts=n_c[kept],
        means=_shrunk(means_cf[kept], centre_f, tau2_c[kept]),
        covariance=covariance,
        noise_variances=tau2_c[kept],
        sizes=counts_kc.sum(axis=1),
        floor=floor,
    )


def _weights(counts_kc: Array, noise_k: Array) -> Array:
    """Returns W (line `weights`), near 1 for a device with many rows of a class, near 0 where the count is noise."""
    squares = np.square(np.maximum(counts_kc, 0))
    return np.asarray(squares / (squares + np.square(2 * noise_k)[:, None]))


def _covariance(
    parts: Sequence[RowSums], scales: Sequence[NoiseScale], counts_kc: Array, means_cf: Array, tau2_c: Array
) -> tuple[Array, float]:
    """Returns the covariance within classes (line `within`), and the smallest eigenvalue that was allowed in it."""
    dimensions = means_cf.shape[1]
    size_k = np.maximum(counts_kc.sum(axis=1), [math.sqrt(counts_kc.shape[1]) * scale.counts for scale in scales])
    v_k = size_k / size_k.mean()
    total = max(float((v_k * counts_kc.sum(axis=1)).sum()), 1.0)
    share_c = np.maximum((v_k[:, None] * counts_kc).sum(axis=0), 0)
    share_c = share_c / max(float(share_c.sum()), 1e-9)
    second = sum(v * part.second_moment for v, part in zip(v_k, parts, strict=True)) / total
    within = second - (means_cf * share_c[:, None]).T @ means_cf + np.eye(dimensions) * float((share_c * tau2_c).sum())
    values, vectors = np.linalg.eigh((within + within.T) / 2)
    noise = math.sqrt(sum(float(v * scale.second_moment) ** 2 for v, scale in zip(v_k, scales, strict=True)))
    edge = 0.5 * math.sqrt(2 * dimensions) * noise / total  # line floor
    floor = max(edge, _SMALLEST_EIGENVALUE * float(np.abs(values).max()))
    return (vectors * np.maximum(values, floor)) @ vectors.T, edge


def _shrunk(means_cf: Array, centre_f: Array, tau2_c: Array) -> Array:
    """Moves each mean towards the centre of all by as much as the noise explains (line `shrink`)."""
    away_cf = means_cf - centre_f
    distance_c = np.maximum(np.square(away_cf).sum(axis=1), 1e-12)
    factor_c = np.maximum(0, 1 - means_cf.shape[1] * tau2_c / distance_c)
    return np.asarray(centre_f + away_cf * factor_c[:, None])
