"""The settings of local training that methods share, and the optimiser that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_range, check_share

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("sgd", "adam")


class PaperDefaults(type):
    """Gives configurations a second set of defaults: with `paper=True` they are `paper_values`.

    What a caller gives always wins, so this must happen where it is still known what was given: when an instance is
    made. The instance has every setting spelled out, so copies of it, and what travels, do not change any more.
    """

    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's values of settings that we deviate in; a method's configuration says them of itself.

        Args:
            given: What the caller gives, for values that depend on it.
        """
        return {}

    def spelled_out(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was given, and if `paper` is among it, the paper's values of what was not."""
        return {**cls.paper_values(given), **given} if given.get("paper") is True else dict(given)

    def __call__(cls, **given: Any) -> Any:
        return super().__call__(**cls.spelled_out(given))


@dataclass(frozen=True, kw_only=True)
class LocalTraining(metaclass=PaperDefaults):
    """How devices train on their own data, and how many a round takes; configurations of methods inherit it.

    Attributes:
        local_epochs: Passes over the device's samples in a round.
        batch_size: Rows of a mini-batch.
        optimizer: `sgd` or `adam`.
        learning_rate, weight_decay: Of that optimiser.
        momentum: Of `sgd`, in [0, 1).
        nesterov: Whether this momentum is Nesterov's.
        participation_ratio: Part of the present devices that a round takes, in (0, 1]; at least one device.
    """

    local_epochs: int = 2
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    participation_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"unknown optimizer {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        check_range("learning_rate", self.learning_rate, 0, open_low=True)
        check_range("weight_decay", self.weight_decay, 0)
        check_range("momentum", self.momentum, 0, 1)
        check_range("local_epochs", self.local_epochs, 1)
        check_range("batch_size", self.batch_size, 1)
        check_share("participation_ratio", self.participation_ratio)

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
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
    )
