"""Several processes that train together, each on its part of every mini-batch, whose statistics batch-norm shares.

Each process runs the same server half on the same answers. In a training, each computes the gradient of its part of the
mini-batch; the gradients are summed over the processes before every optimiser step, so the weights stay equal.
Batch-norm uses the statistics of the whole mini-batch. The result is that of one process within rounding.

The sum is taken after the backward pass. `DistributedDataParallel` takes it during the pass, so a process that runs out
of memory there could not repeat its step without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from fleetdistill.seeds import derive_seed
from fleetdistill_server.training.weights import Weights


class ProcessLostError(Exception):
    """Another process of the engine ended; the engine ends too, and the supervisor restarts all of them."""


@contextmanager
def connect() -> Iterator[None]:
    """Raises ProcessLostError for an error of the communication in the block."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLostError(
            "another process of the engine ended during a round; its own error is in the log. The engine restarts from "
            f"the last checkpoint or resume point: {error}"
        ) from error


class Ranks:
    """The processes that train together; by default one.

    Attributes:
        size: Number of processes.
        rank: Number of this process, from 0.
    """

    size = 1
    rank = 0

    def own(self, rows_b: Tensor, is_mean: bool) -> Tensor:
        """Returns this process's part of a mini-batch; the whole if the loss is not a mean over rows.

        A mini-batch with fewer rows than processes is not divided either.
        """
        return rows_b

    def share(self, rows: int, whole: int, is_mean: bool) -> float:
        """Returns the weight of the loss of `rows` rows of this process in that of a mini-batch of `whole` rows."""
        return rows / whole

    def shares(self, whole: int, is_mean: bool) -> tuple[int, int]:
        """Returns the smallest and the largest number of rows of one process in a mini-batch of `whole` rows."""
        return whole, whole

    def weights(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> Weights:
        """Returns the weights of a training; they are sharded only if there are several processes."""
        return Weights(model, optimizer)

    def summed(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Replaces the gradients by their sums over all processes; returns the sum of the losses."""
        return loss

    def from_first(self, value: Any) -> Any:
        """Returns the value of the process of rank 0."""
        return value

    def training(self, model: nn.Module, seed: int) -> AbstractContextManager[None]:
        """Returns the context of a training."""
        return nullcontext()

    def communicates_in_forward(self, normalises: bool) -> bool:
        """Returns whether a forward pass waits for other processes, so that one process cannot repeat a step."""
        return False


ALONE = Ranks()
"""This process alone."""


class JoinedRanks(Ranks):
    """The processes of torch's default process group, which must be initialised."""

    def __init__(self) -> None:
        self.size = distributed.get_world_size()
        self.rank = distributed.get_rank()

    def own(self, rows_b: Tensor, is_mean: bool) -> Tensor:
        return rows_b.tensor_split(self.size)[self.rank] if self._divides(len(rows_b), is_mean) else rows_b

    def share(self, rows: int, whole: int, is_mean: bool) -> float:
        return rows / whole / (1 if self._divides(whole, is_mean) else self.size)

    def _divides(self, whole: int, is_mean: bool) -> bool:
        return is_mean and whole >= self.size

    def shares(self, whole: int, is_mean: bool) -> tuple[int, int]:
        if not self._divides(whole, is_mean):
            return whole, whole
        return whole // self.size, -(-whole // self.size)

    def weights(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> Weights:
        if not sharded:
            return Weights(model, optimizer)
        from fleetdistill_server.training.sharding import ShardedWeights  # FSDP takes a second to import

        device = next(model.parameters()).device.type
        return ShardedWeights(model, optimizer, init_device_mesh(device, (self.size,)))

    def summed(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        values = [loss.reshape(1), *gradients]
        together = torch.cat([value.flatten() for value in values])
        with connect():
            distributed.all_reduce(together)
        for one, total in zip(values, together.split([value.numel() for value in values]), strict=True):
            one.copy_(total.view_as(one))
        return loss

    def from_first(self, value: Any) -> Any:
        result = [value]
        with connect():
            distributed.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        return result[0]

    @contextmanager
    def training(self, model: nn.Module, seed: int) -> Iterator[None]:
        """Draws other random numbers in each process, and the same ones in all processes afterwards."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), over_all_ranks(model):
            torch.manual_seed(derive_seed(seed, self.rank))
            yield

    def communicates_in_forward(self, normalises: bool) -> bool:
        return normalises


# --- Batch-norm over the mini-batch of all processes; `torch.nn.SyncBatchNorm` does the same on GPUs only.


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
