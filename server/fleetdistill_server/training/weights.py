"""Weights and optimiser states of a training that are whole in every process."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn


class Weights:
    """Weights and optimiser states of a training; the interface of `ShardedWeights`.

    Args:
        model: The model that is trained.
        optimizer: Its optimiser.

    Attributes:
        sharded: Whether each process holds only a part within the `with` block.
    """

    sharded = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that are not yet summed over the processes."""
        trained = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in trained if parameter.grad is not None]

    def agreed(self, decision: bool) -> bool:
        """Returns whether this process must call `state`."""
        return decision

    def state(self) -> dict[str, Any]:
        """Returns the whole states of model and optimiser."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
