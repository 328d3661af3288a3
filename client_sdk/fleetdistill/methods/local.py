"""The settings of local training that methods share, and the optimiser that they describe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_range

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a device trains on its own data; configurations of methods inherit it.

    Attributes:
        local_epochs: Passes over the device's samples in a round.
        batch_size: Rows of a mini-batch.
        optimizer: `sgd` (with Nesterov momentum where momentum > 0) or `adam`.
        learning_rate, momentum, weight_decay: Of that optimiser; Adam has no momentum setting.
    """

    local_epochs: int = 2
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"unknown optimizer {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        check_range("learning_rate", self.learning_rate, 0, open_low=True)
        check_range("weight_decay", self.weight_decay, 0)
        check_range("momentum", self.momentum, 0, 1)
        check_range("local_epochs", self.local_epochs, 1)
        check_range("batch_size", self.batch_size, 1)

    def cross_entropy_epochs(self, participation: int) -> int:
        """Passes towards its labels that a device makes in its n-th round, from 1: what controls must match."""
        return self.local_epochs


def make_local_optimizer(config: LocalTraining, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of a configuration, fresh."""
    import torch

    from fleetdistill.local_training import make_optimizer

    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return make_optimizer(
        parameters,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        weight_decay=config.weight_decay,
    )
