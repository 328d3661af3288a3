"""SKR: gives every row of local logits the same entropy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fleetdistill.methods.feddkc.ranges import check_epsilon, check_target_entropy
from fleetdistill_server.methods.feddkc.refined import (
    Bracket,
    Refined,
    as_logits,
    bisect_rows,
    by_block,
    normalise,
    search_codes,
    spread,
)

_SAME_LOGIT = 1e-290  # relative to the row's largest gap; below this the bracket would leave float64


def skr(logits: ArrayLike | Tensor, target: float, *, epsilon: float = 1e-3) -> Refined:
    """Refines knowledge so that every row has the same entropy: softmax(z / θ) with a search for θ (eqs. 15-20).

    θ is bisected geometrically inside `unit_bracket`. A row with M equal maxima has exactly one root if
    log2 M < E < log2 C. A row with E <= log2 M gets the nearest distribution, 1/M on its maxima (`unreachable`); a
    constant row is returned uniform (`degenerate`). A temperature before SKR would only rescale θ, so SKR has no such
    setting.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The entropy E in bits, in (0, log2 C).
        epsilon: ε in (0, 2·min(E, log2 C - E)); the search stops when the entropy is within ε/2 of the target.

    Returns:
        Refined knowledge with tags `ok`, `unreachable`, `degenerate`; the scale is θ, in the unit of the logits.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range.
    """
    logits = as_logits(logits)
    check_target_entropy(target, logits.shape[1])
    check_epsilon(epsilon, target_entropy=target, classes=logits.shape[1])
    return by_block(logits, lambda block_bc: _skr_block(block_bc, target, epsilon))


class Gaps(NamedTuple):
    """Distances of logits from their row's maximum, in units of the row's largest gap, which avoids overflow."""

    unit_bc: Tensor  # in [0, 1]
    half_span_b: Tensor  # half of the largest gap, which itself may overflow; 0 in a constant row
    tied_bc: Tensor  # True for the maxima
    count_b: Tensor  # M, float64


def row_gaps(logits_bc: Tensor) -> Gaps:
    """Returns the gaps of logits `[N, C]`."""
    half_bc = logits_bc.amax(dim=1, keepdim=True) / 2 - logits_bc / 2
    half_span_b1 = half_bc.amax(dim=1, keepdim=True)
    unit_bc = half_bc / torch.where(half_span_b1 > 0, half_span_b1, 1)
    tied_bc = unit_bc <= _SAME_LOGIT
    return Gaps(unit_bc, half_span_b1.squeeze(1), tied_bc, tied_bc.sum(dim=1, dtype=torch.float64))


def _solvable(gaps: Gaps, target: float) -> Tensor:
    return (gaps.count_b < gaps.unit_bc.shape[1]) & (gaps.count_b.log2() < target)


def unit_bracket(gaps: Gaps, target: float) -> Bracket:
    """Returns temperatures that bracket the root, in closed form and in units of the row's largest gap D.

    With the smallest positive gap δ and M equal maxima, and D = 1:
    high = D / ((log2 C - E)·ln 2), low = δ / ln(C/ρ²), ρ = (E - log2 M) / (2 + log2 C).
    Above, every weight lies in [e^-(D/θ), 1], so H >= E. Below, the mass outside the maxima is at most ρ², and
    grouping gives H <= log2 M + ρ·(2 + log2 C) = E. The bracket of a row without a root is undefined.
    """
    classes = gaps.unit_bc.shape[1]
    smallest_b = gaps.unit_bc.masked_fill(gaps.tied_bc, 1).amin(dim=1)
    rho_b = (target - gaps.count_b.log2()) / (2 + math.log2(classes))
    low_b = smallest_b / (math.log(classes) - 2 * rho_b.log())  # not C/ρ²: ρ² may underflow
    return Bracket(low_b, torch.full_like(low_b, 1 / ((math.log2(classes) - target) * math.log(2))))


def _skr_block(logits_bc: Tensor, target: float, epsilon: float) -> Refined:
    gaps = row_gaps(logits_bc)
    solved_b = _solvable(gaps, target)
    rows = solved_b.nonzero().squeeze(1)
    low_b, high_b = unit_bracket(gaps, target)
    offsets_rc = -gaps.unit_bc[rows]
    theta_r = bisect_rows(offsets_rc, low_b[rows], high_b[rows], target, epsilon, _entropy_bits)
    refined_bc = gaps.tied_bc / gaps.count_b[:, None]  # the limit θ → 0; uniform in a constant row
    refined_bc[rows] = normalise((offsets_rc / theta_r[:, None]).exp_())
    codes_b = search_codes(gaps.count_b == logits_bc.shape[1], solved_b)
    return Refined(refined_bc, codes_b, spread(theta_r, rows, len(logits_bc)) * 2 * gaps.half_span_b)


def _entropy_bits(offsets_bc: Tensor, theta_b: Tensor) -> Tensor:
    """Returns H(softmax(o / θ)) = (ln Z - Σ w·o/θ / Z) / ln 2 in bits, with w = e^(o/θ), Z = Σ w."""
    scaled_bc = offsets_bc * theta_b.reciprocal()[:, None]
    weights_bc = scaled_bc.exp()
    total_b = weights_bc.sum(dim=1)
    return (total_b.log() - weights_bc.mul_(scaled_bc).sum(dim=1) / total_b) / math.log(2)
