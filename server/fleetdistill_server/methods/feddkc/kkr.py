"""KKR with the linear kernel: gives every row of local logits the same peak."""

from __future__ import annotations

import math

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fleetdistill.methods.feddkc.ranges import check_target_peak
from fleetdistill_server.methods.feddkc.refined import (
    Refined,
    RefinementTag,
    as_logits,
    by_block,
    check_temperature,
    softmax,
)

_FLAT = 1e-6  # rows with C·peak - 1 up to this are constant: eq. (14) divides by it
_TIE = 1e-9  # relative; softmax of equal logits may differ in the last digits
_NEGATIVE = -1e-12  # rounding, not a class that the stretch pushed below zero


def kkr(logits: ArrayLike | Tensor, target: float, *, temperature: float = 1.0) -> Refined:
    """Refines knowledge so that every row peaks at the same probability: KKR with the linear kernel.

    Eq. (14), written as φ = u + s·(v - u) with u = 1/C, s = (CT-1)/(C·v_m-1) and v = softmax(z / τ_r).
    A row with a negative result is rectified: T at the peak, (1-T)/(C-1) elsewhere (the paper's rule). Of M equal
    maxima each gets T if M·T <= 1, otherwise only the first. The paper does not define constant rows (0/0) and ties;
    a constant row is returned uniform.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The peak T in (1/C, 1).
        temperature: τ_r > 0, applied before the refinement.

    Returns:
        Refined knowledge with tags `affine`, `rectified`, `rectified-tied`, `degenerate`; the scale of affine rows is
        `linear_scale`.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range.
    """
    logits = check_kkr(logits, target, temperature)
    return by_block(logits, lambda block_bc: _kkr_block(softmax(block_bc, temperature), target))


def check_kkr(logits: ArrayLike | Tensor, target: float, temperature: float) -> Tensor:
    """Checks the arguments of `kkr` and returns the logits as a tensor."""
    checked = as_logits(logits)
    check_target_peak(target, checked.shape[1])
    check_temperature(temperature)
    return checked


def stretch(probs_bc: Tensor, target: float) -> Tensor:
    """Evaluates eq. (14) around the uniform distribution, which is better conditioned than the paper's fraction.

    Args:
        probs_bc: `[N, C]` float64, each row a distribution.
        target: The peak T in (1/C, 1).

    Returns:
        `[N, C]` float64. Each row sums to 1 and may have negative values; a constant row becomes NaN or infinity.
    """
    uniform = 1 / probs_bc.shape[1]
    peak_b1 = probs_bc.amax(dim=1, keepdim=True)
    factor_b1 = (probs_bc.shape[1] * target - 1) / (probs_bc.shape[1] * peak_b1 - 1)
    return uniform + factor_b1 * (probs_bc - uniform)


def linear_scale(probs_bc: Tensor, target: float) -> Tensor:
    """Returns the input scale t of eq. (13) for σ(x) = x + 1, `[N]` float64, at which the linear kernel peaks at T.

    t is negative if T > v_m, although the paper assumes t > 0; eq. (14) remains valid. Arguments as in `stretch`.
    """
    peak_b = probs_bc.amax(dim=1)
    return (peak_b - target) / (peak_b * (probs_bc.shape[1] * target - 1))


def is_flat(probs_bc: Tensor) -> Tensor:
    """Returns `[N]` bool: True for constant rows, for which eq. (14) divides by zero."""
    return probs_bc.shape[1] * probs_bc.amax(dim=1) - 1 <= _FLAT


def _kkr_block(probs_bc: Tensor, target: float) -> Refined:
    refined_bc = stretch(probs_bc, target)
    flat_b = is_flat(probs_bc)
    affine_b = ~flat_b & (refined_bc.amin(dim=1) >= _NEGATIVE)
    rows = (~flat_b & ~affine_b).nonzero().squeeze(1)
    refined_bc.clamp_(0, 1)
    refined_bc[rows], codes_r = rectify(probs_bc[rows], target)
    refined_bc[flat_b] = 1 / probs_bc.shape[1]
    codes_b = torch.where(flat_b, RefinementTag.DEGENERATE, RefinementTag.AFFINE).to(torch.int8)
    codes_b[rows] = codes_r
    return Refined(refined_bc, codes_b, linear_scale(probs_bc, target).masked_fill(~affine_b, math.nan))


def is_tied(probs_bc: Tensor) -> Tensor:
    """Returns `[N, C]` bool: True for each of a row's equal maxima."""
    return probs_bc >= probs_bc.amax(dim=1, keepdim=True) * (1 - _TIE)


def rectify(probs_bc: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """Sets the maximum to T, or all equal maxima if their sum is at most 1, and shares the rest evenly."""
    tied_bc = is_tied(probs_bc)
    count_b1 = tied_bc.sum(dim=1, keepdim=True, dtype=torch.float64)  # an integer times T would be float32
    shared_b1 = (count_b1 > 1) & (count_b1 * target <= 1)
    first_bc = tied_bc & (tied_bc.cumsum(dim=1) == 1)
    peaks_bc = torch.where(shared_b1, tied_bc, first_bc)
    peaks_b1 = peaks_bc.sum(dim=1, keepdim=True, dtype=torch.float64)
    rest_b1 = ((1 - peaks_b1 * target) / (probs_bc.shape[1] - peaks_b1)).clamp_min(0)
    codes_b = torch.where(shared_b1.squeeze(1), RefinementTag.RECTIFIED_TIED, RefinementTag.RECTIFIED)
    return torch.where(peaks_bc, target, rest_b1), codes_b.to(torch.int8)
