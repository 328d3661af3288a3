"""FedDKC's refined knowledge, and the code that its refinements share: checks, blocks of rows, and the baseline.

KKR gives every row of local logits the same peak, SKR the same entropy. Both compute in float64 on the logits' torch
device. Rows are independent, and the results have no gradient, because refined knowledge is a constant teacher.

References:
    Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation,
    arXiv 2022 / ACM TIST 2024, section 3 and the appendix. Equation numbers are the paper's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fleetdistill.errors import ConfigurationError, KnowledgeError

BLOCK_ELEMENTS = 1 << 17  # a block's temporaries fit the CPU's cache, and memory is bounded for any upload


class RefinementTag(IntEnum):
    """How a row was refined."""

    AFFINE = 0  # KKR: scaled around the uniform distribution
    RECTIFIED = 1  # KKR: scaling gave a negative value; T at the peak, the rest shared evenly
    RECTIFIED_TIED = 2  # as RECTIFIED, with T at each of several equal maxima
    DEGENERATE = 3  # a constant row, returned uniform
    UNREACHABLE = 4  # no input scale or temperature reaches the target; the fallback applied
    OK = 5  # the search (SKR, kernels) reached the target, or no refinement is configured

    @property
    def word(self) -> str:
        """The tag's name in reports, such as `rectified-tied`."""
        return self.name.lower().replace("_", "-")


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

    def counts(self) -> Counter[str]:
        """Returns the number of rows with each tag; tags that do not occur are missing and count as 0."""
        rows = torch.bincount(self.codes, minlength=len(RefinementTag)).tolist()
        return Counter({tag.word: count for tag, count in zip(RefinementTag, rows, strict=True) if count})


def no_refinement(logits: ArrayLike | Tensor, *, temperature: float) -> Refined:
    """Returns softmax(z / τ) without refinement, the baseline of the refinements.

    Args:
        logits: Local knowledge z, `[N, C]`, any float dtype, finite.
        temperature: τ > 0.

    Returns:
        Probabilities; every row is tagged `ok` and its scale is NaN.

    Raises:
        KnowledgeError: Logits are not `[N, C >= 2]` or not finite.
        ConfigurationError: The temperature is out of range.
    """
    logits = as_logits(logits)
    check_temperature(temperature)
    return by_block(logits, lambda block_bc: _untouched(softmax(block_bc, temperature)))


# --- inputs


def as_logits(given: ArrayLike | Tensor) -> Tensor:
    """Returns logits as a tensor `[N, C]`. Raises KnowledgeError for another shape or for non-finite values."""
    logits = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise KnowledgeError(f"logits have shape {tuple(logits.shape)}, expected [N, C] with C >= 2 classes")
    if bool(
        logits.detach().sum().isfinite()
    ):  # a NaN or infinity makes the sum non-finite; so can overflow, hence the check below
        return logits
    bad_rows = (~logits.isfinite().all(dim=1)).nonzero()
    if len(bad_rows):
        raise KnowledgeError(f"non-finite logits at row {int(bad_rows[0])}")
    return logits


def check_temperature(temperature: float) -> None:
    """Raises ConfigurationError unless the temperature is finite and above 0."""
    if not 0 < temperature < math.inf:
        raise ConfigurationError(f"temperature must be a finite number > 0, got {temperature}")


def _float64(logits: Tensor) -> Tensor:
    return logits.detach().to(torch.float64)


def softmax(logits_bc: Tensor, temperature: float) -> Tensor:
    """Returns softmax(z / temperature) by row."""
    # Subtract the maximum before dividing: large logits would overflow with a temperature below 1.
    return normalise(((logits_bc - logits_bc.amax(dim=1, keepdim=True)) / temperature).exp_())


def normalise(weights_bc: Tensor) -> Tensor:
    """Divides each row by its sum."""
    return weights_bc / weights_bc.sum(dim=1, keepdim=True)


def by_block(logits: Tensor, refine: Callable[[Tensor], Refined]) -> Refined:
    """Refines rows in blocks that fit the CPU's cache, or all at once on an accelerator."""
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    blocks = [refine(_float64(block_bc)) for block_bc in torch.split(logits, rows)]
    return Refined(
        probabilities=torch.cat([block.probabilities for block in blocks]),
        codes=torch.cat([block.codes for block in blocks]),
        scale=torch.cat([block.scale for block in blocks]),
    )


def _untouched(probs_bc: Tensor) -> Refined:
    codes_b = torch.full_like(probs_bc[:, 0], RefinementTag.OK, dtype=torch.int8)
    return Refined(probs_bc, codes_b, torch.full_like(probs_bc[:, 0], math.nan))


def search_codes(flat_b: Tensor, solved_b: Tensor) -> Tensor:
    """Returns the `RefinementTag` codes `[N]` int8 of a search: ok, degenerate (flat) or unreachable."""
    unsolved_b = torch.where(flat_b, RefinementTag.DEGENERATE, RefinementTag.UNREACHABLE)
    return unsolved_b.masked_fill(solved_b, RefinementTag.OK).to(torch.int8)


def spread(values_r: Tensor, rows: Tensor, length: int) -> Tensor:
    """Returns a tensor `[length]` with the values at the given rows and NaN elsewhere."""
    spread_b = values_r.new_full((length,), math.nan)
    spread_b[rows] = values_r
    return spread_b


# --- Row-wise bisection, used by KKR's kernels and by SKR.

MAX_HALVINGS = 200  # enough to narrow any bracket to one float64


class Bracket(NamedTuple):
    """Lower and upper bounds `[N]` of each row's root; NaN for a row without a root."""

    low: Tensor
    high: Tensor


def bisect_rows(
    data_bc: Tensor,
    low_b: Tensor,
    high_b: Tensor,
    target: float,
    epsilon: float,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Halves each row's bracket on a logarithmic scale until the measure is within ε/2 of the target.

    The measure must be below the target at the low end and above it at the high end.
    """
    found_b = torch.empty_like(low_b)
    rows = torch.arange(len(low_b), device=low_b.device)
    for _ in range(MAX_HALVINGS):
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
