"""Rolls back training whose weights are not finite, so that one failed round does not end a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from fleetdistill.errors import DataError, KnowledgeError
from fleetdistill.wire.schema import float_type

__all__ = [
    "Rate",
    "Stateful",
    "check_can_be_sent",
    "check_weights",
    "reason_not_sent",
    "snapshot",
    "train_or_roll_back",
]

Rate = tuple[str, float]
"""Name and value of the learning-rate setting that an error message names as the probable cause."""


class Stateful(Protocol):
    """An object with a state dict: a module or an optimiser."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads a state."""


def snapshot(*changed: Stateful) -> Callable[[], None]:
    """Copies the current states; returns a function that restores them."""
    before = [copy.deepcopy(item.state_dict()) for item in changed]

    def restore() -> None:
        for one, state in zip(changed, before, strict=True):
            one.load_state_dict(state)

    return restore


def train_or_roll_back(train: Callable[[], object], *changed: Stateful, rate: Rate) -> str | None:
    """Calls `train`, and restores all states if training fails.

    Args:
        train: Function that trains; raises KnowledgeError or DataError on failure.
        changed: The modules and optimisers that `train` changes. Non-finite weights of a module are also a failure.
        rate: The learning-rate setting that the reason names.

    Returns:
        The reason for the rollback, or None if training succeeded.
    """
    restore = snapshot(*changed)
    try:
        train()
        for item in changed:
            if isinstance(item, nn.Module):
                check_weights(item, rate)
    except (KnowledgeError, DataError) as error:
        restore()
        return str(error)
    return None


def check_weights(module: nn.Module, rate: Rate) -> None:
    """Raises KnowledgeError if a weight or a batch-norm statistic is not finite after training."""
    for name, tensor in module.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise KnowledgeError(f"{name} is not finite after training; {_rate_advice(rate)}")


def check_can_be_sent(values: Tensor, knowledge_type: str, rate: Rate) -> None:
    """Raises KnowledgeError if a model's output after training is not finite or too large for the wire.

    Args:
        values: Outputs of any shape.
        knowledge_type: The run's knowledge type; the limit is 3.4e38 for float32, 65504 for float16 and uint8.
        rate: The learning-rate setting that the error names.
    """
    reason = reason_not_sent(values, knowledge_type)
    if reason:
        raise KnowledgeError(f"after training {reason}; {_rate_advice(rate)}")


def reason_not_sent(values: Tensor, knowledge_type: str) -> str | None:
    """Returns why a model's outputs cannot be sent, or None if they can; see `check_can_be_sent`."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    travels_in = float_type(knowledge_type)
    limit = float(np.finfo(travels_in).max)
    return (
        None if largest <= limit else f"the largest output is {largest:g}, the limit of {travels_in.name} is {limit:g}"
    )


def _rate_advice(rate: Rate) -> str:
    name, value = rate
    return f"{name} = {value:g} is probably too large"
