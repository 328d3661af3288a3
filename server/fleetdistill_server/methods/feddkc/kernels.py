"""KKR with kernels other than the linear one: searches the input scale of each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.feddkc.ranges import check_epsilon, check_kernel_name
from fleetdistill_server.methods.feddkc.kkr import check_kkr, is_flat, is_tied, kkr, rectify
from fleetdistill_server.methods.feddkc.refined import (
    Bracket,
    Refined,
    bisect_rows,
    by_block,
    normalise,
    search_codes,
    softmax,
    spread,
)

Kernel = Callable[[Tensor], Tensor]
_SCAN = torch.logspace(-4, 4, 161, dtype=torch.float64)  # x = 1/t


def kkr_kernel(
    logits: ArrayLike | Tensor,
    target: float,
    *,
    kernel: str | Kernel = "exp",
    epsilon: float = 1e-3,
    temperature: float = 1.0,
) -> Refined:
    """Refines knowledge so that every row has the same peak: σ(v_i / (t·v_m)), normalised (eqs. 9, 10, 21-25).

    `linear` calls `kkr`. For `exp` the root lies in a bracket in closed form. For other kernels 1/t is scanned on a
    geometric grid from 1e-4 to 1e4, and the first interval in which the peak crosses T (the smoothest solution) is
    bisected. A row whose peak cannot reach T with the kernel is rectified as in `kkr` and tagged `unreachable`.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        target: The peak T in (1/C, 1).
        kernel: One of `fleetdistill.methods.feddkc.ranges.KERNELS`, or an elementwise function of a float64 tensor
            >= 0 that is positive (also at 0), continuous, increasing and not proportional to x. Samples of the
            function are checked; the range in which σ overflows is not used.
        epsilon: The search stops when the peak is within half of this.
        temperature: τ_r > 0, applied before the refinement.

    Returns:
        Refined knowledge with tags `ok`, `unreachable`, `degenerate` (the tags of `kkr` for `linear`); scale t.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: A setting is out of range, or the kernel violates a condition.
    """
    if kernel == "linear":
        check_epsilon(epsilon)
        return kkr(logits, target, temperature=temperature)
    logits = check_kkr(logits, target, temperature)
    check_epsilon(epsilon)
    family = _exponential(target) if kernel == "exp" else _sample(kernel, target)
    return by_block(logits, lambda block_bc: _kernel_block(softmax(block_bc, temperature), target, epsilon, family))


class _Family(NamedTuple):
    """A kernel for the search, as functions of ratios v_i / v_m `[B, C]` and x = 1/t."""

    weights: Callable[[Tensor, Tensor], Tensor]  # ratios [B, C], x [B, 1] -> σ(r·x) / σ(x), so 1 at the peak
    bracket: Callable[[Tensor], Bracket]  # ratios [B, C] -> ends of x, NaN where the peak never crosses T


def _kernel_block(probs_bc: Tensor, target: float, epsilon: float, family: _Family) -> Refined:
    ratios_bc = probs_bc / probs_bc.amax(dim=1, keepdim=True)
    bracket = family.bracket(ratios_bc)
    flat_b = is_flat(probs_bc)
    solved_b = ~flat_b & bracket.low.isfinite()
    rows, others = solved_b.nonzero().squeeze(1), (~solved_b).nonzero().squeeze(1)
    ratios_rc, low_r, high_r = ratios_bc[rows], bracket.low[rows], bracket.high[rows]
    x_r = bisect_rows(ratios_rc, low_r, high_r, target, epsilon, lambda r, x: _peak(family, r, x))
    refined_bc = torch.empty_like(probs_bc)
    refined_bc[rows] = normalise(family.weights(ratios_rc, x_r[:, None]))
    refined_bc[others], _ = rectify(probs_bc[others], target)
    refined_bc[flat_b] = 1 / probs_bc.shape[1]
    return Refined(refined_bc, search_codes(flat_b, solved_b), spread(1 / x_r, rows, len(probs_bc)))


def _peak(family: _Family, ratios_bc: Tensor, x_b: Tensor) -> Tensor:
    return 1 / family.weights(ratios_bc, x_b[:, None]).sum(dim=1)


def _exponential(target: float) -> _Family:
    """Returns the family of σ = e^x. Its peak rises from 1/C to 1/M with x; two bounds bracket the only root."""

    def bracket(ratios_bc: Tensor) -> Bracket:
        classes = ratios_bc.shape[1]
        tied_bc = is_tied(ratios_bc)
        count_b = tied_bc.sum(dim=1, dtype=torch.float64)
        second_b = ratios_bc.masked_fill(tied_bc, 0).amax(dim=1)
        # Every weight >= e^-x bounds the peak from above; every weight outside the maxima <= e^-x(1-r2) from below.
        low_b = torch.full_like(second_b, math.log((classes - 1) * target / (1 - target)))
        high_b = ((classes - count_b) * target / (1 - count_b * target)).log() / (1 - second_b)
        return Bracket(low_b.masked_fill(count_b * target >= 1, math.nan), high_b)

    return _Family(lambda ratios_bc, x_b1: ((ratios_bc - 1) * x_b1).exp(), bracket)


def _sample(kernel: str | Kernel, target: float) -> _Family:
    """Returns the family of any other kernel, whose bracket is found by a scan."""
    sigma = _named_kernel(kernel) if isinstance(kernel, str) else kernel
    grid = _check_grid(sigma)

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


def _check_grid(sigma: Kernel) -> list[float]:
    """Checks a kernel on the scan's grid and returns the part of the grid on which it is finite."""
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
    """Returns whether the kernel is discontinuous, by repeatedly halving each interval towards its steeper half."""
    low, high = grid[:-1], grid[1:]
    for _ in range(60):
        middle = (low + high) / 2
        below, at, above = (sigma(x).to(torch.float64) for x in (low, middle, high))
        lower = at - below > above - at
        low, high = torch.where(lower, low, middle), torch.where(lower, middle, high)
    rise = (sigma(high) - sigma(low)).to(torch.float64)
    return bool((rise > 1e-6 * sigma(high).to(torch.float64)).any())
