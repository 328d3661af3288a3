"""The settings of local training that methods share, and the optimiser that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fleetdistill.methods.base import check_choice, check_range, check_share, check_types

if TYPE_CHECKING:
    import torch

__all__ = ["LocalTraining", "make_local_optimizer"]

OPTIMIZERS = ("sgd", "adam")
ROBUST = ("gross", "strict", "off")
"""How far the server distrusts single devices; `off` takes everything as it is sent."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How devices train on their own data, and how many a round takes; configurations of methods inherit it.

    `from_settings` makes one of what an operator writes. The constructor takes values that are spelled out: `paper` is
    then a record of how they came about and changes none of them.

    Attributes:
        local_epochs: Passes over the device's samples in a round.
        batch_size: Rows of a mini-batch.
        optimizer: `sgd` or `adam`.
        learning_rate, weight_decay: Of that optimiser.
        momentum: Of `sgd`, in [0, 1).
        nesterov: Whether this momentum is Nesterov's.
        participation_ratio: Part of the present devices that a round takes, in (0, 1]; at least one device.
        robust: What the server does about devices that are far from the others: `gross` bounds their weight and leaves
            out what no honest device sends, `strict` tests class statistics more narrowly, `off` does nothing.
    """

    keeps_optimizer: ClassVar[bool] = False
    """Whether a device's optimiser, with its momentum, lives on from round to round; if not, each has a new one."""

    usual_rounds: ClassVar[int] = 30
    """Rounds of a simulated run unless told otherwise; 1 for a method that has nothing to do in later ones."""

    local_epochs: int = 2
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    participation_ratio: float = 1.0
    robust: str = "gross"

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_range("learning_rate", self.learning_rate, 0, open_low=True)
        check_range("weight_decay", self.weight_decay, 0)
        check_range("momentum", self.momentum, 0, 1)
        check_range("local_epochs", self.local_epochs, 1)
        check_range("batch_size", self.batch_size, 1)
        check_share("participation_ratio", self.participation_ratio)
        check_choice("robust", self.robust, ROBUST)

    @classmethod
    def form(cls, settings: Mapping[str, Any]) -> type[LocalTraining]:
        """The configuration class of the form that these settings choose, for a method of several forms.

        Raises:
            ConfigurationError: There is no such form.
        """
        return cls

    @classmethod
    def other_forms(cls) -> Mapping[str, type[LocalTraining]]:
        """The configurations of the method's other forms, by the settings that choose them, as in run.toml."""
        return {}

    @classmethod
    def from_settings(cls, given: Mapping[str, Any]) -> Self:
        """The configuration of an operator's settings: what is given wins, with `paper` true over the paper's values.

        Args:
            given: Settings by name; those that are left out take the paper's values or else our defaults.

        Raises:
            ConfigurationError: A value is out of its range.
            TypeError: There is no such setting.
        """
        papers = {"robust": "off", **cls.paper_values(given)} if given.get("paper") is True else {}
        return cls(**{**papers, **given})

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's values of settings that we deviate in; a method's configuration says them of itself.

        `robust` is off with all of them: no paper here knows it.

        Args:
            given: What the operator gives, for values that depend on it.
        """
        return {}

    def check_rounds(self, rounds: int) -> None:
        """Raises ConfigurationError for a run of too few rounds to be of use; by default none is. 0: it has no end."""

    def cross_entropy_epochs(self, participation: int) -> int:
        """Passes towards its labels that a device makes in its n-th round, from 1: what controls must match."""
        return self.local_epochs

    def local_rate(self, number: int) -> float:
        """Learning rate of local training in a round, numbered from 1: what controls must match too."""
        return self.learning_rate


def make_local_optimizer(config: LocalTraining, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of a configuration, fresh."""
    import torch

    from fleetdistill.training.local_training import make_optimizer

    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return make_optimizer(
        parameters,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
    )
