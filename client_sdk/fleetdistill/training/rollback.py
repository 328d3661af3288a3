"""Training that comes to nothing finite is taken back, so that one bad round does not end a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from fleetdistill.errors import DataError, KnowledgeError
from fleetdistill.wire.schema import float_type

Rate = tuple[str, float]
"""The setting that training goes wrong with, and its value: what a failure names."""


class Stateful(Protocol):
    """A module or an optimiser."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes a state."""


def snapshot(*changed: Stateful) -> Callable[[], None]:
    """Remembers states as they are now; the function that it returns puts them back."""
    before = [copy.deepcopy(one.state_dict()) for one in changed]

    def restore() -> None:
        for one, state in zip(changed, before, strict=True):
            one.load_state_dict(state)

    return restore


def train_or_roll_back(train: Callable[[], object], *changed: Stateful, rate: Rate) -> str | None:
    """Trains, and puts everything back to where it was if that failed.

    Args:
        train: Raises KnowledgeError or DataError where it fails; what it returns is not used.
        changed: What it changes. A module whose weights are not finite afterwards counts as a failure too.
        rate: The setting that is then to blame.

    Returns:
        Why it was taken back; None if it was not.
    """
    restore = snapshot(*changed)
    try:
        train()
        for one in changed:
            if isinstance(one, nn.Module):
                check_weights(one, rate)
    except (KnowledgeError, DataError) as error:
        restore()
        return str(error)
    return None


def check_weights(module: nn.Module, rate: Rate) -> None:
    """Raises KnowledgeError for weights or statistics that are not finite after training."""
    for name, tensor in module.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise KnowledgeError(f"{name} is not finite after training; {_too_large(rate)}")


def check_can_be_sent(values: Tensor, knowledge_type: str, rate: Rate) -> None:
    """Raises KnowledgeError for what a model says after training, if a value is not finite or does not fit the wire.

    Args:
        values: Of any shape.
        knowledge_type: The run's; what a server says goes up to 3.4e38 with float32, with the others up to 65504.
        rate: The setting that is then to blame.
    """
    reason = reason_not_sent(values, knowledge_type)
    if reason:
        raise KnowledgeError(f"after training {reason}; {_too_large(rate)}")


def reason_not_sent(values: Tensor, knowledge_type: str) -> str | None:
    """Why what a model says cannot be sent, as `check_can_be_sent` has it; None if it can."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    travels_in = float_type(knowledge_type)
    limit = float(np.finfo(travels_in).max)
    return None if largest <= limit else f"the model says up to {largest:g}, {travels_in.name} goes up to {limit:g}"


def _too_large(rate: Rate) -> str:
    name, value = rate
    return f"{name} = {value:g} is probably too large"
