"""Optimiser steps that fit in memory: after an out-of-memory error a step is repeated with less memory.

The mini-batch and its gradient stay the same. If the loss is a mean over independent rows, the mini-batch is split into
micro-batches whose gradients are summed. Otherwise, as with batch-norm, the tensors saved for the backward pass are
moved to the host's memory. Both settings are kept for later steps and reported once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from fleetdistill.errors import RunError
from fleetdistill_server.training.hardware import Hardware

Notify = Callable[[str, str], object]
"""Receives the kind and the text of an event."""


class ModelSnapshot:
    """The buffers of a model, such as batch-norm statistics, and the random state, before a step of a mini-batch.

    A forward pass that runs out of memory may already have changed them.

    Attributes:
        steps: Number of steps of the mini-batch that are taken.
        failed: Whether a later step of the mini-batch ran out of memory.
    """

    steps = 0
    failed = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers = list(model.buffers())
        self._saved = [torch.empty_like(buffer) for buffer in self._buffers]
        self._device = device

    def begin(self) -> None:
        """Saves the state before the first step of a mini-batch."""
        self.steps, self.failed = 0, False
        self._save()

    def count_step(self) -> None:
        """Saves the state after a step."""
        self.steps += 1
        self._save()

    def _save(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._saved, self._buffers)
        self._random = torch.get_rng_state()
        if self._device.type == "cuda":
            self._random_on_gpu = torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        """Restores the saved state."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved)
        torch.set_rng_state(self._random)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_on_gpu, self._device)


class Memory:
    """The size of micro-batches, and whether saved tensors are moved to the host.

    Args:
        hardware: Provides the device and the first size of micro-batches.
        notify: Receives the event that reports a change.
    """

    def __init__(self, hardware: Hardware, notify: Notify) -> None:
        self._device = hardware.device
        self._notify = notify
        self._micro = hardware.micro_batch
        self._offloads = False

    def parts(self, rows: int, shares: tuple[int, int], separable: bool) -> Sequence[slice]:
        """Returns the micro-batches of a mini-batch; a single one unless the loss is a mean over independent rows.

        Args:
            rows: Rows of this process.
            shares: Smallest and largest number of rows of a process; all processes get equally many micro-batches.
            separable: Whether the loss is a mean over independent rows.
        """
        smallest, largest = shares
        count = min(math.ceil(largest / self._micro), smallest) if separable and self._micro else 1
        stops = [rows * number // count for number in range(count + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(stops)]

    def saving(self) -> AbstractContextManager[object]:
        """Returns the context of forward and backward passes."""
        if not self._offloads:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self._device.type == "cuda")

    def use_less(self, rows: int, separable: bool, error: torch.OutOfMemoryError) -> None:
        """Reduces the memory of later steps.

        Args:
            rows: Rows of the mini-batch that did not fit.
            separable: Whether the loss is a mean over independent rows.
            error: The error; freed tensors are returned to the device.

        Raises:
            RunError: The step already uses as little memory as possible.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        used = min(self._micro or rows, rows)
        if separable and used > 1:
            first, self._micro = not self._micro, (used + 1) // 2
            text = f"mini-batches are split into micro-batches of at most {self._micro} rows, with the same result"
        elif not self._offloads:
            first, self._offloads = True, True
            text = "tensors saved for the backward pass are moved to the host's memory, with the same result"
        else:
            raise self.exhausted(error) from error
        if first:
            self._notify("out-of-memory", f"{self._device} ran out of memory; {text}")

    def exhausted(self, error: torch.OutOfMemoryError) -> RunError:
        """Returns the error that ends the run because a single step does not fit."""
        return RunError(
            f"the engine's device {self._device} has too little memory for one step; lower the method's batch_size, "
            f"or name a smaller [model] server: {error}"
        )
