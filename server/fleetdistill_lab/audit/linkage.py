"""Membership inference: how often the rows that a device trained on stand out among rows that nobody trained on.

An attack gives every row a score. A row is linked if its score is above the scores of all its decoys, which are rows of
the same class that no device has seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Linkage:
    """Result of one attack.

    Attributes:
        linked: Share of rows with a score above those of all their decoys; 1 / (decoys + 1) by chance.
        interval: 95 % Wilson interval of `linked` over the rows.
        auc: Mean share of decoys with a lower score, ties counting half; 0.5 by chance.
        tpr1: Share of rows with a score above that of 99 % of their decoys; 0.01 by chance.
        rows: Number of attacked rows.
        decoys: Fewest decoys that any row had.
    """

    linked: float
    interval: tuple[float, float]
    auc: float
    tpr1: float
    rows: int
    decoys: int


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of one attacked row and its decoys.

    Attributes:
        row: Score of the row.
        decoys: `[d]` scores of the decoys, d at least 1.
    """

    row: float
    decoys: NDArray[np.float64]


def linkage(scored: Sequence[Scored]) -> Linkage:
    """Summarizes the scores of at least one row."""
    above = np.array([float((item.decoys < item.row).mean()) for item in scored])
    ties = np.array([float((item.decoys == item.row).mean()) for item in scored])
    linked = int((above == 1).sum())
    return Linkage(
        linked=linked / len(scored),
        interval=wilson(linked, len(scored)),
        auc=float((above + ties / 2).mean()),
        tpr1=float((above >= 0.99).mean()),
        rows=len(scored),
        decoys=min(len(item.decoys) for item in scored),
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns the 95 % Wilson interval of a share.

    Args:
        successes: In [0, trials].
        trials: At least 1.
    """
    share, scale = successes / trials, 1 + _Z**2 / trials
    centre = (share + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def known_shares(estimated_kc: NDArray[np.float64], true_kc: NDArray[np.float64]) -> float:
    """Returns how well estimates give away the devices' class shares.

    Args:
        estimated_kc: `[devices, classes]`, rows sum to 1.
        true_kc: `[devices, classes]`, rows sum to 1.

    Returns:
        The mean over devices of 1 - |estimated - true|₁ / |uniform - true|₁: 1 for exact estimates, 0 for ones as good
        as the uniform guess, negative for worse. Devices with uniform shares give nothing away and are left out.
    """
    errors_k = np.abs(estimated_kc - true_kc).sum(axis=1)
    uniform_k = np.abs(1 / true_kc.shape[1] - true_kc).sum(axis=1)
    uneven = uniform_k > 1e-9
    return float((1 - errors_k[uneven] / uniform_k[uneven]).mean()) if uneven.any() else 0.0
