"""Row-wise bisection, used by KKR's kernels and by SKR."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

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
