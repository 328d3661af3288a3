"""Batch-norm over the mini-batch of all processes; `torch.nn.SyncBatchNorm` does the same on GPUs only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def over_all_ranks(model: nn.Module) -> Iterator[None]:
    """Makes batch-norm layers in train mode use the statistics of all processes' rows within the block."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.forward = partial(_normalise, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _normalise(norm: _BatchNorm, values: Tensor) -> Tensor:
    """Returns the normalised values `[b, C, ...]` and updates the running statistics."""
    if not norm.training:
        return type(norm).forward(norm, values)
    axes = [axis for axis in range(values.ndim) if axis != 1]
    wide = values.float()
    count = torch.tensor([values.numel() / values.shape[1]], device=values.device)
    distributed.all_reduce(count)
    mean_c = _sum_over_ranks(wide.sum(axes)) / count
    shape = [-1 if axis == 1 else 1 for axis in range(values.ndim)]
    centred = wide - mean_c.view(shape)
    variance_c = _sum_over_ranks(centred.square().sum(axes)) / count
    _update(norm, mean_c.detach(), variance_c.detach() * count / (count - 1).clamp_min(1))
    scaled = centred * (variance_c + norm.eps).rsqrt().view(shape)
    if norm.affine:
        scaled = scaled * norm.weight.view(shape) + norm.bias.view(shape)
    return scaled.to(values.dtype)


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the sum over all processes, through which gradients flow."""
    total: Tensor = all_reduce(values)
    return total


def _update(norm: _BatchNorm, mean_c: Tensor, variance_c: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean_c, factor)
    norm.running_var.lerp_(variance_c, factor)
