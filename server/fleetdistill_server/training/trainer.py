"""Trains and applies the networks of server halves: one loop for all methods, on the engine's hardware.

On a CPU in float32, in one process, the results are bit-equal to those of `fleetdistill.training.local_training`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from fleetdistill.training.local_training import (
    TrainingReport,
    check_plan,
    check_smallest_batch,
    extract,
    smallest_batch,
)
from fleetdistill.training.model import frozen_batch_norm, in_mode
from fleetdistill_server.phases import phase
from fleetdistill_server.training.compiling import Compiling
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.loop import BatchLosses, Loop, Plan
from fleetdistill_server.training.memory import Memory, Notify
from fleetdistill_server.training.ranks import ALONE, Ranks
from fleetdistill_server.training.resume import ResumePoints
from fleetdistill_server.training.rows import Pool

logger = logging.getLogger("fleetdistill.server.training")


def _log(kind: str, text: str) -> None:
    logger.warning("%s: %s", kind, text)


class Trainer:
    """Trains and applies the networks of a server half.

    Args:
        hardware: Device, precision and memory limits.
        notify: Receives events, such as too little memory; by default they are logged.
        points: Resume points of long trainings; None for none.
        ranks: The processes that train together; by default this one alone.
    """

    def __init__(
        self,
        hardware: Hardware,
        notify: Notify = _log,
        points: ResumePoints | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.hardware = hardware
        self.notify = notify
        self.points = points
        self.ranks = ranks
        self._memory = Memory(hardware, lambda kind, text: self.notify(kind, text))

    def train_steps(
        self,
        model: nn.Module,
        pools: int | Sequence[int],
        *,
        epochs: int,
        batch_size: int,
        optimizer: torch.optim.Optimizer,
        losses: BatchLosses,
        generator: torch.Generator,
        pool: Pool | None = None,
        separable: bool = True,
    ) -> TrainingReport:
        """Trains in shuffled mini-batches, in train mode; every module's mode is restored afterwards.

        Args:
            model: Module on the hardware's device; the optimiser may have only some of its parameters.
            pools: Number of rows; or the sizes of several pools, whose rows follow each other in every epoch.
            epochs: Passes over the rows, at least 1.
            batch_size: Rows per mini-batch, at least 1, or 2 with batch-norm.
            optimizer: Optimiser of the model's parameters.
            losses: Function of the epoch, from 0, of a mini-batch's row numbers on the device and, with `pool`, of
                these rows of the pool. Each yielded loss is one optimiser step, taken before the next loss is computed.
            generator: CPU generator; one permutation of each pool is drawn per epoch.
            pool: Rows that are read before they are needed.
            separable: Whether each loss is a mean over rows, so that a mini-batch can be split. Batch-norm is
                recognised and need not be declared.

        Raises:
            ConfigurationError: `epochs` or `batch_size` is out of range.
            DataError: There are no rows.
            KnowledgeError: A loss is not finite.
            RunError: A single step does not fit in the device's memory.
        """
        sizes = [pools] if isinstance(pools, int) else list(pools)
        check_plan(epochs, batch_size)
        smallest = check_smallest_batch(model, sum(sizes), batch_size)
        frozen = sum(sizes) < smallest_batch(model)
        plan = Plan(
            model=model,
            pools=sizes,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            losses=losses,
            generator=generator,
            pool=pool,
            smallest=smallest,
            is_mean=separable,
            normalises=not frozen and smallest_batch(model) > 1,
        )
        weights = self.ranks.weights(model, optimizer, sharded=self.hardware.shards(model))
        hardware = replace(self.hardware, channels_last=False, compile="off") if weights.sharded else self.hardware
        with ExitStack() as stack:
            stack.enter_context(phase("distillation"))
            stack.enter_context(in_mode(model, training=True))
            stack.enter_context(frozen_batch_norm(model, frozen))
            stack.enter_context(hardware.layout(model))
            stack.enter_context(self.ranks.training(model, generator.initial_seed()))
            compiling = stack.enter_context(Compiling(model, hardware, self.notify))
            return Loop(plan, hardware, self._memory, compiling, self.ranks, weights, self.points).run()

    def extract(
        self,
        model_fn: Callable[[Tensor], Tensor],
        inputs: Tensor,
        batch_size: int = 1024,
        *,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Runs a model over all rows as `local_training.extract`, with the hardware's precision.

        After an out-of-memory error the batches are halved.
        """
        while True:
            try:
                with self.hardware.autocast():
                    result = extract(model_fn, inputs, batch_size, model=model)
                return result.float() if self.hardware.dtype is not torch.float32 else result
            except torch.OutOfMemoryError as error:
                if batch_size == 1:
                    raise self._memory.exhausted(error) from error
                batch_size = (batch_size + 1) // 2
