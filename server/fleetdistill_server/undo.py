"""Training on the server that comes to nothing finite is taken back, so that one bad round does not end a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fleetdistill.errors import DataError, KnowledgeError


class Stateful(Protocol):
    """A module or an optimiser."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes a state."""


def undone(train: Callable[[], object], *changed: Stateful) -> str:
    """Trains, and puts everything back to where it was if that failed.

    Args:
        train: Raises KnowledgeError or DataError where it fails; what it returns is not used.
        changed: What it changes. A module whose weights are not finite afterwards counts as a failure too.

    Returns:
        Why it was taken back; empty if it was not.
    """
    before = [copy.deepcopy(one.state_dict()) for one in changed]
    try:
        train()
        for one in changed:
            if isinstance(one, nn.Module):
                check_finite(one)
    except (KnowledgeError, DataError) as error:
        for one, state in zip(changed, before, strict=True):
            one.load_state_dict(state)
        return str(error)
    return ""


def check_finite(module: nn.Module) -> None:
    """Raises KnowledgeError for weights or statistics that are not finite after training."""
    for name, tensor in module.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise KnowledgeError(f"{name} is not finite after training; the learning rate is probably too large")


def check_says(values: Tensor) -> None:
    """Raises KnowledgeError for what a model says after training, if it is not finite or too large for float16."""
    largest = float(values.abs().max()) if len(values) else 0.0
    if not largest <= _LARGEST:
        raise KnowledgeError(
            f"after training the model says up to {largest:g}, knowledge goes up to {_LARGEST:g}; "
            "the learning rate is probably too large"
        )


_LARGEST = torch.finfo(torch.float16).max
