"""FedDKC's knowledge refinement: gives every row of local logits the same peak (KKR) or entropy (SKR).

All rows at once, in float64, on the device of the logits. Rows are independent of each other, and the results
carry no gradient: refined knowledge is a constant teacher.

References:
    Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation,
    arXiv 2022 / ACM TIST 2024, section 3 and the appendix. Equation numbers are the paper's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.methods.feddkc.ranges import (
    check_epsilon,
    check_kernel_name,
    check_target_entropy,
    check_target_peak,
)

__all__ = [
    "Bracket",
    "Refined",
    "RefinementTag",
    "kkr",
    "kkr_kernel",
    "kkr_unrectified",
    "linear_kernel_scale",
    "no_refinement",
    "skr",
    "skr_bracket",
]

Kernel = Callable[[Tensor], Tensor]

_FLAT = 1e-6  # C·peak - 1 up to here is a constant row: eq. (14) divides by it
_TIE = 1e-9  # relative; softmax of equal logits may differ in the last digits
_NEGATIVE = -1e-12  # rounding, not a class that the stretch pushed below zero
_MOST_HALVINGS = 200  # by then the bracket is one float64, however small ε is
_SAME_LOGIT = 1e-290  # relative to the row's largest gap; below this the bracket would leave float64
_BLOCK_ELEMENTS = 1 << 17  # keeps a block's scratch near the CPU's cache, and memory bounded whatever the upload
_SCAN = torch.logspace(-4, 4, 161, dtype=torch.float64)  # x = 1/t


class RefinementTag(IntEnum):
    """What happened to a row. The word is the name in lower case with hyphens."""

    AFFINE = 0  # KKR: stretched or flattened around the uniform distribution
    RECTIFIED = 1  # KKR: the stretch went negative; T at the peak, the rest shared evenly
    RECTIFIED_TIED = 2  # as before, with T at each of several equal maxima
    DEGENERATE = 3  # a constant row, returned uniform: it has no peak to move
    UNREACHABLE = 4  # no input scale or temperature reaches the target; the nearest rule applied
    OK = 5  # the search (SKR, kernels) met the target, or nothing was to be done

    @property
    def word(self) -> str:
        """The specification's word, such as `rectified-tied`."""
        return self.name.lower().replace("_", "-")


_WORDS: NDArray[np.str_] = np.array([tag.word for tag in RefinementTag])


@dataclass(frozen=True, eq=False)
class Refined:
    """Refined knowledge, row by row.

    Attributes:
        probabilities: `[N, C]` float64; every row sums to 1.
        codes: `[N]` int8, the `RefinementTag` of each row, on the same device.
        scale: `[N]` float64: SKR's temperature θ, a kernel's input scale t; NaN where a row has none.
    """

    probabilities: Tensor
    codes: Tensor
    scale: Tensor

    def __iter__(self) -> Iterator[Any]:
        """`probabilities, tags = skr(logits, target)`."""
        return iter((self.probabilities, self.tags))

    @cached_property
    def tags(self) -> NDArray[np.str_]:
        """The tag of each row in words, `[N]`: `refined.tags[0] == "degenerate"`."""
        words: NDArray[np.str_] = _WORDS[self.codes.cpu().numpy()]
        return words

    def counts(self) -> Counter[str]:
        """How many rows carry each tag; 0 for a tag that does not occur."""
        rows = torch.bincount(self.codes, minlength=len(RefinementTag)).tolist()
        return Counter({tag.word: count for tag, count in zip(RefinementTag, rows, strict=True) if count})


class Bracket(NamedTuple):
    """Ends `[N]` between which each row's root lies; NaN where there is none."""

    low: Tensor
    high: Tensor


def no_refinement(logits: ArrayLike | Tensor, *, temperature: float) -> Refined:
    """Leaves knowledge as it is, softmax(z / τ): FedGKT, the baseline of the refinements.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        temperature: τ > 0.

    Returns:
        Probabilities; every row is tagged `ok` and has no scale.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: The temperature is out of range.
    """
    logits = _as_logits(logits)
    _check_temperature(temperature)
    return _by_block(logits, lambda block_bc: _untouched(_softmax(block_bc, temperature)))


def kkr(logits: ArrayLike | Tensor, target: float, *, temperature: float = 1.0) -> Refined:
    """Refines knowledge so that every row peaks at the same probability: KKR with the linear kernel.

    Eq. (14), written as φ = u + s·(v - u) with u = 1/C, s = (CT-1)/(C·v_m-1) and v = softmax(z / τ_r).
    A row that this pushes below zero is rectified: T at the peak, (1-T)/(C-1) elsewhere (the paper's rule); equal
    maxima each get T where they fit (M·T <= 1), else the first one does. The paper leaves constant rows (0/0) and
    ties open; a constant row is returned uniform.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The peak T in (1/C, 1).
        temperature: τ_r > 0, applied before the refinement.

    Returns:
        Tags `affine`, `rectified`, `rectified-tied`, `degenerate`; the scale is `linear_kernel_scale` on affine rows.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range.
    """
    logits = _check_kkr(logits, target, temperature)
    return _by_block(logits, lambda block_bc: _kkr_block(_softmax(block_bc, temperature), target))


def kkr_unrectified(logits: ArrayLike | Tensor, target: float, *, temperature: float = 1.0) -> Tensor:
    """Eq. (14) alone, `[N, C]` float64: may be negative, and NaN or infinite in a constant row (0/0).

    Arguments and errors are those of `kkr`.
    """
    logits = _check_kkr(logits, target, temperature)
    return _stretch(_softmax(_float64(logits), temperature), target)


def linear_kernel_scale(logits: ArrayLike | Tensor, target: float, *, temperature: float = 1.0) -> Tensor:
    """Eq. (13) for σ(x) = x + 1: the input scale t, `[N]` float64, at which the linear kernel peaks at T.

    Negative where T > v_m, against the paper's own t > 0; eq. (14) stays right there. Arguments and errors are those
    of `kkr`.
    """
    logits = _check_kkr(logits, target, temperature)
    return _linear_scale(_softmax(_float64(logits), temperature), target)


def kkr_kernel(
    logits: ArrayLike | Tensor,
    target: float,
    *,
    kernel: str | Kernel = "exp",
    epsilon: float = 1e-3,
    temperature: float = 1.0,
) -> Refined:
    """Refines knowledge to one peak with another kernel: σ(v_i / (t·v_m)), normalised, t searched (eqs. 9, 10, 21-25).

    `linear` is `kkr`. `exp` has its root in a closed bracket. For the others 1/t is scanned on a geometric grid from
    1e-4 to 1e4, and the first interval in which the peak crosses T (the smoothest solution) is bisected. Not every
    kernel reaches every T: such a row is rectified as in `kkr` and tagged `unreachable`.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The peak T in (1/C, 1).
        kernel: One of `fleetdistill.methods.feddkc.ranges.KERNELS`, or an elementwise function of a float64 tensor
            >= 0 that is positive (at 0 too), continuous, increasing and not proportional to x. This is checked by
            sampling; the range in which σ overflows is not used.
        epsilon: The search stops when the peak is within half of this.
        temperature: τ_r > 0, applied before the refinement.

    Returns:
        Tags `ok`, `unreachable`, `degenerate` (those of `kkr` for `linear`); the scale is t.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range or the kernel does not qualify.
    """
    if kernel == "linear":
        check_epsilon(epsilon)
        return kkr(logits, target, temperature=temperature)
    logits = _check_kkr(logits, target, temperature)
    check_epsilon(epsilon)
    family = _exponential(target) if kernel == "exp" else _sampled(kernel, target)
    return _by_block(logits, lambda block_bc: _kernel_block(_softmax(block_bc, temperature), target, epsilon, family))


def skr(logits: ArrayLike | Tensor, target: float, *, epsilon: float = 1e-3) -> Refined:
    """Refines knowledge so that every row has the same entropy: SKR, softmax(z / θ) with θ searched (eqs. 15-20).

    θ is bisected geometrically inside `skr_bracket`, which replaces the paper's existence proof: a root exists, and
    only one, exactly if log2 M < E < log2 C for M equal maxima. A row with E <= log2 M gets the nearest distribution,
    1/M on its maxima (`unreachable`); a constant row is returned uniform (`degenerate`). A temperature before SKR
    would only rescale θ, so there is none.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The entropy E in bits, in (0, log2 C).
        epsilon: ε < 2·min(E, log2 C - E); the search stops when the entropy is within half of it.

    Returns:
        Tags `ok`, `unreachable`, `degenerate`; the scale is θ, in the unit of the logits.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range.
    """
    logits = _as_logits(logits)
    check_target_entropy(target, logits.shape[1])
    check_epsilon(epsilon, target_entropy=target, classes=logits.shape[1])
    return _by_block(logits, lambda block_bc: _skr_block(block_bc, target, epsilon))


def skr_bracket(logits: ArrayLike | Tensor, target: float) -> Bracket:
    """Temperatures between which SKR's root lies, in closed form.

    With the largest gap D to the row's maximum, the smallest positive gap δ and M equal maxima:
    high = D / ((log2 C - E)·ln 2), low = δ / ln(C/ρ²), ρ = (E - log2 M) / (2 + log2 C).
    Above, every weight lies in [e^-(D/θ), 1], so H >= E. Below, the mass outside the maxima is at most ρ², and
    grouping gives H <= log2 M + ρ·(2 + log2 C) = E. Arguments and errors are those of `skr`.
    """
    logits = _as_logits(logits)
    check_target_entropy(target, logits.shape[1])
    gaps = _gaps(_float64(logits))
    low_b, high_b = _unit_bracket(gaps, target)
    none_b = ~_solvable(gaps, target)
    return Bracket(*((end_b * 2 * gaps.half_span_b).masked_fill(none_b, math.nan) for end_b in (low_b, high_b)))


# What goes in


def _check_kkr(logits: ArrayLike | Tensor, target: float, temperature: float) -> Tensor:
    checked = _as_logits(logits)
    check_target_peak(target, checked.shape[1])
    _check_temperature(temperature)
    return checked


def _as_logits(given: ArrayLike | Tensor) -> Tensor:
    """Tensors as they are, numpy arrays and lists as tensors."""
    logits = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise KnowledgeError(f"logits have shape {tuple(logits.shape)}, expected [N, C] with C >= 2 classes")
    if bool(logits.detach().sum().isfinite()):  # any NaN or Inf survives a sum; a sum that overflows is looked at again
        return logits
    bad_rows = (~logits.isfinite().all(dim=1)).nonzero()
    if len(bad_rows):
        raise KnowledgeError(f"non-finite logits at row {int(bad_rows[0])}")
    return logits


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ConfigurationError(f"temperature must be a finite number > 0, got {temperature}")


def _float64(logits: Tensor) -> Tensor:
    return logits.detach().to(torch.float64)


def _softmax(logits_bc: Tensor, temperature: float) -> Tensor:
    # Shifted before the division: logits near float64's end would overflow with a temperature below 1.
    return _normalised(((logits_bc - logits_bc.amax(dim=1, keepdim=True)) / temperature).exp_())


def _normalised(weights_bc: Tensor) -> Tensor:
    return weights_bc / weights_bc.sum(dim=1, keepdim=True)


def _by_block(logits: Tensor, refine: Callable[[Tensor], Refined]) -> Refined:
    """Rows are independent, so a CPU refines blocks that fit its cache; an accelerator takes all at once."""
    rows = max(1, _BLOCK_ELEMENTS // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    blocks = [refine(_float64(block_bc)) for block_bc in torch.split(logits, rows)]
    return Refined(
        probabilities=torch.cat([block.probabilities for block in blocks]),
        codes=torch.cat([block.codes for block in blocks]),
        scale=torch.cat([block.scale for block in blocks]),
    )


def _untouched(probs_bc: Tensor) -> Refined:
    codes_b = torch.full_like(probs_bc[:, 0], RefinementTag.OK, dtype=torch.int8)
    return Refined(probs_bc, codes_b, torch.full_like(probs_bc[:, 0], math.nan))


# KKR, linear kernel


def _stretch(probs_bc: Tensor, target: float) -> Tensor:
    """Eq. (14) around the uniform distribution: better conditioned than the paper's fraction."""
    uniform = 1 / probs_bc.shape[1]
    peak_b1 = probs_bc.amax(dim=1, keepdim=True)
    factor_b1 = (probs_bc.shape[1] * target - 1) / (probs_bc.shape[1] * peak_b1 - 1)
    return uniform + factor_b1 * (probs_bc - uniform)


def _linear_scale(probs_bc: Tensor, target: float) -> Tensor:
    peak_b = probs_bc.amax(dim=1)
    return (peak_b - target) / (peak_b * (probs_bc.shape[1] * target - 1))


def _is_flat(probs_bc: Tensor) -> Tensor:
    return probs_bc.shape[1] * probs_bc.amax(dim=1) - 1 <= _FLAT


def _kkr_block(probs_bc: Tensor, target: float) -> Refined:
    refined_bc = _stretch(probs_bc, target)
    flat_b = _is_flat(probs_bc)
    affine_b = ~flat_b & (refined_bc.amin(dim=1) >= _NEGATIVE)
    rows = (~flat_b & ~affine_b).nonzero().squeeze(1)
    refined_bc.clamp_(0, 1)
    refined_bc[rows], codes_r = _rectify(probs_bc[rows], target)
    refined_bc[flat_b] = 1 / probs_bc.shape[1]
    codes_b = torch.where(flat_b, RefinementTag.DEGENERATE, RefinementTag.AFFINE).to(torch.int8)
    codes_b[rows] = codes_r
    return Refined(refined_bc, codes_b, _linear_scale(probs_bc, target).masked_fill(~affine_b, math.nan))


def _is_tied(probs_bc: Tensor) -> Tensor:
    return probs_bc >= probs_bc.amax(dim=1, keepdim=True) * (1 - _TIE)


def _rectify(probs_bc: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """T on the maximum, or on all equal maxima where that leaves no negative rest; the rest shared evenly."""
    tied_bc = _is_tied(probs_bc)
    count_b1 = tied_bc.sum(dim=1, keepdim=True, dtype=torch.float64)  # integer times T would be float32
    shared_b1 = (count_b1 > 1) & (count_b1 * target <= 1)
    first_bc = tied_bc & (tied_bc.cumsum(dim=1) == 1)
    peaks_bc = torch.where(shared_b1, tied_bc, first_bc)
    peaks_b1 = peaks_bc.sum(dim=1, keepdim=True, dtype=torch.float64)
    rest_b1 = ((1 - peaks_b1 * target) / (probs_bc.shape[1] - peaks_b1)).clamp_min(0)
    codes_b = torch.where(shared_b1.squeeze(1), RefinementTag.RECTIFIED_TIED, RefinementTag.RECTIFIED)
    return torch.where(peaks_bc, target, rest_b1), codes_b.to(torch.int8)


# KKR, other kernels


class _Family(NamedTuple):
    """A kernel as the search sees it, with ratios v_i / v_m `[B, C]` and x = 1/t."""

    weights: Callable[[Tensor, Tensor], Tensor]  # ratios [B, C], x [B, 1] -> σ(r·x) / σ(x), so 1 at the peak
    bracket: Callable[[Tensor], Bracket]  # ratios [B, C] -> ends of x, NaN where the peak never crosses T


def _kernel_block(probs_bc: Tensor, target: float, epsilon: float, family: _Family) -> Refined:
    ratios_bc = probs_bc / probs_bc.amax(dim=1, keepdim=True)
    bracket = family.bracket(ratios_bc)
    flat_b = _is_flat(probs_bc)
    solved_b = ~flat_b & bracket.low.isfinite()
    rows, others = solved_b.nonzero().squeeze(1), (~solved_b).nonzero().squeeze(1)
    ratios_rc, low_r, high_r = ratios_bc[rows], bracket.low[rows], bracket.high[rows]
    x_r = _bisect(ratios_rc, low_r, high_r, target, epsilon, lambda r, x: _peak(family, r, x))
    refined_bc = torch.empty_like(probs_bc)
    refined_bc[rows] = _normalised(family.weights(ratios_rc, x_r[:, None]))
    refined_bc[others], _ = _rectify(probs_bc[others], target)
    refined_bc[flat_b] = 1 / probs_bc.shape[1]
    return Refined(refined_bc, _search_codes(flat_b, solved_b), _spread(1 / x_r, rows, len(probs_bc)))


def _peak(family: _Family, ratios_bc: Tensor, x_b: Tensor) -> Tensor:
    return 1 / family.weights(ratios_bc, x_b[:, None]).sum(dim=1)


def _exponential(target: float) -> _Family:
    """σ = e^x: the peak rises from 1/C to 1/M as x grows, so two bounds on its sum bracket the only root."""

    def bracket(ratios_bc: Tensor) -> Bracket:
        classes = ratios_bc.shape[1]
        tied_bc = _is_tied(ratios_bc)
        count_b = tied_bc.sum(dim=1, dtype=torch.float64)
        second_b = ratios_bc.masked_fill(tied_bc, 0).amax(dim=1)
        # Every weight >= e^-x bounds the peak from above; every weight outside the maxima <= e^-x(1-r2) from below.
        low_b = torch.full_like(second_b, math.log((classes - 1) * target / (1 - target)))
        high_b = ((classes - count_b) * target / (1 - count_b * target)).log() / (1 - second_b)
        return Bracket(low_b.masked_fill(count_b * target >= 1, math.nan), high_b)

    return _Family(lambda ratios_bc, x_b1: ((ratios_bc - 1) * x_b1).exp(), bracket)


def _sampled(kernel: str | Kernel, target: float) -> _Family:
    """Any other kernel: nothing is known of its peak but what a scan shows."""
    sigma = _named_kernel(kernel) if isinstance(kernel, str) else kernel
    grid = _checked_grid(sigma)

    def weights(ratios_bc: Tensor, x_b1: Tensor) -> Tensor:
        return sigma(ratios_bc * x_b1).to(torch.float64) / sigma(x_b1).to(torch.float64)

    family = _Family(weights, lambda ratios_bc: _first_crossing(family, ratios_bc, grid, target))
    return family


def _named_kernel(name: str) -> Kernel:
    check_kernel_name(name)
    sigmas: dict[str, Kernel] = {
        "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),  # torch's own softplus turns linear at 20
        "sigmoid": torch.sigmoid,
        "quadratic": lambda x: 1 + x * x,
    }
    return sigmas[name]


def _first_crossing(family: _Family, ratios_bc: Tensor, grid: list[float], target: float) -> Bracket:
    low_b = torch.full_like(ratios_bc[:, 0], math.nan)
    high_b = low_b.clone()
    rows = torch.arange(len(low_b), device=low_b.device)
    below_b = _peak(family, ratios_bc, torch.full_like(low_b, grid[0])) < target
    for before, x in pairwise(grid):
        rows, ratios_bc = rows[below_b], ratios_bc[below_b]
        below_b = _peak(family, ratios_bc, torch.full_like(ratios_bc[:, 0], x)) < target
        low_b[rows[~below_b]], high_b[rows[~below_b]] = before, x
    return Bracket(low_b, high_b)


def _checked_grid(sigma: Kernel) -> list[float]:
    """The part of the scan on which the kernel is finite, once the kernel is found fit on it."""
    grid = torch.cat([torch.zeros(1, dtype=torch.float64), _SCAN])
    value = sigma(grid)
    if not isinstance(value, Tensor) or value.shape != grid.shape:
        raise ConfigurationError("kernel must map a float64 tensor to a tensor of the same shape, element by element")
    usable = int(value.isfinite().cumprod(dim=0).sum())
    fault = "is not finite" if usable < 3 else _kernel_fault(sigma, grid[:usable], value[:usable].to(torch.float64))
    if fault:
        name = getattr(sigma, "__name__", repr(sigma))
        raise ConfigurationError(f"kernel must be positive, increasing and not proportional to x; {name} {fault}")
    return [float(x) for x in grid[1:usable]]


def _kernel_fault(sigma: Kernel, grid: Tensor, value: Tensor) -> str | None:
    slope = value[1:] / grid[1:]
    if bool(value[0] <= 0):  # with σ(0) = 0 the peak would not start at 1/C, and the search has no lower end
        return "is not positive at 0"
    if bool((value.diff() < 0).any()) or bool(value[-1] <= value[0]):
        return "does not increase"
    if bool(slope.max() - slope.min() <= 1e-9 * slope.max()):
        return "is proportional"
    return "jumps" if _jumps(sigma, grid) else None


def _jumps(sigma: Kernel, grid: Tensor) -> bool:
    """Halves every interval of the grid towards its steeper half: a continuous kernel's rise vanishes, a jump stays."""
    low, high = grid[:-1], grid[1:]
    for _ in range(60):
        middle = (low + high) / 2
        below, at, above = (sigma(x).to(torch.float64) for x in (low, middle, high))
        lower = at - below > above - at
        low, high = torch.where(lower, low, middle), torch.where(lower, middle, high)
    rise = (sigma(high) - sigma(low)).to(torch.float64)
    return bool((rise > 1e-6 * sigma(high).to(torch.float64)).any())


# SKR


class _Gaps(NamedTuple):
    """Logits below their row's maximum, in units of the row's largest gap: no scale of logits overflows."""

    unit_bc: Tensor  # in [0, 1]
    half_span_b: Tensor  # half of the largest gap, since the whole may overflow; 0 in a constant row
    tied_bc: Tensor  # the maxima
    count_b: Tensor  # M, float64


def _gaps(logits_bc: Tensor) -> _Gaps:
    half_bc = logits_bc.amax(dim=1, keepdim=True) / 2 - logits_bc / 2
    half_span_b1 = half_bc.amax(dim=1, keepdim=True)
    unit_bc = half_bc / torch.where(half_span_b1 > 0, half_span_b1, 1)
    tied_bc = unit_bc <= _SAME_LOGIT
    return _Gaps(unit_bc, half_span_b1.squeeze(1), tied_bc, tied_bc.sum(dim=1, dtype=torch.float64))


def _solvable(gaps: _Gaps, target: float) -> Tensor:
    return (gaps.count_b < gaps.unit_bc.shape[1]) & (gaps.count_b.log2() < target)


def _unit_bracket(gaps: _Gaps, target: float) -> Bracket:
    """`skr_bracket` with D = 1."""
    classes = gaps.unit_bc.shape[1]
    smallest_b = gaps.unit_bc.masked_fill(gaps.tied_bc, 1).amin(dim=1)
    rho_b = (target - gaps.count_b.log2()) / (2 + math.log2(classes))
    low_b = smallest_b / (math.log(classes) - 2 * rho_b.log())  # not C/ρ²: ρ² may underflow
    return Bracket(low_b, torch.full_like(low_b, 1 / ((math.log2(classes) - target) * math.log(2))))


def _skr_block(logits_bc: Tensor, target: float, epsilon: float) -> Refined:
    gaps = _gaps(logits_bc)
    solved_b = _solvable(gaps, target)
    rows = solved_b.nonzero().squeeze(1)
    low_b, high_b = _unit_bracket(gaps, target)
    offsets_rc = -gaps.unit_bc[rows]
    theta_r = _bisect(offsets_rc, low_b[rows], high_b[rows], target, epsilon, _entropy_bits)
    refined_bc = gaps.tied_bc / gaps.count_b[:, None]  # the limit θ → 0; uniform in a constant row
    refined_bc[rows] = _normalised((offsets_rc / theta_r[:, None]).exp_())
    codes_b = _search_codes(gaps.count_b == logits_bc.shape[1], solved_b)
    return Refined(refined_bc, codes_b, _spread(theta_r, rows, len(logits_bc)) * 2 * gaps.half_span_b)


def _entropy_bits(offsets_bc: Tensor, theta_b: Tensor) -> Tensor:
    """H(softmax(o / θ)) = (ln Z - Σ w·o/θ / Z) / ln 2 with w = e^(o/θ), Z = Σ w."""
    scaled_bc = offsets_bc * theta_b.reciprocal()[:, None]
    weights_bc = scaled_bc.exp()
    total_b = weights_bc.sum(dim=1)
    return (total_b.log() - weights_bc.mul_(scaled_bc).sum(dim=1) / total_b) / math.log(2)


# Searches


def _bisect(
    data_bc: Tensor,
    low_b: Tensor,
    high_b: Tensor,
    target: float,
    epsilon: float,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Halves each row's bracket on a logarithmic scale until the measure is within ε/2 of the target.

    The measure lies below the target at the low end and above it at the high end. Rows that arrived are dropped.
    """
    found_b = torch.empty_like(low_b)
    rows = torch.arange(len(low_b), device=low_b.device)
    for _ in range(_MOST_HALVINGS):
        if not len(rows):
            break
        middle_b = low_b.sqrt() * high_b.sqrt()  # the product itself may underflow
        found_b[rows] = middle_b
        error_b = measure(data_bc, middle_b) - target
        low_b, high_b = torch.where(error_b < 0, middle_b, low_b), torch.where(error_b < 0, high_b, middle_b)
        far = (error_b.abs() >= epsilon / 2).nonzero().squeeze(1)
        if len(far) < len(rows):
            rows, data_bc, low_b, high_b = (part.index_select(0, far) for part in (rows, data_bc, low_b, high_b))
    return found_b


def _search_codes(flat_b: Tensor, solved_b: Tensor) -> Tensor:
    unsolved_b = torch.where(flat_b, RefinementTag.DEGENERATE, RefinementTag.UNREACHABLE)
    return unsolved_b.masked_fill(solved_b, RefinementTag.OK).to(torch.int8)


def _spread(values_r: Tensor, rows: Tensor, length: int) -> Tensor:
    spread_b = values_r.new_full((length,), math.nan)
    spread_b[rows] = values_r
    return spread_b
