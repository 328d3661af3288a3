"""Settings of local training that all methods share, and the optimiser that they configure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fleetdistill.methods.base import check_choice, check_range, check_share, check_types
from fleetdistill.privacy.accountant import Guarantee

if TYPE_CHECKING:
    import torch

__all__ = ["LocalTraining", "make_local_optimizer"]

OPTIMIZERS = ("sgd", "adam")
ROBUST = ("gross", "strict", "off")
"""How strictly the server limits devices that are far from the others; `off` accepts everything unchanged."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of training on the devices' own data; the base class of every method's configuration.

    `from_settings` builds a configuration from an operator's settings. The constructor uses every value unchanged:
    `paper` then only records that the paper's values were chosen.

    Attributes:
        local_epochs: Passes over the device's samples in a round, at least 1.
        batch_size: Rows of a mini-batch, at least 1.
        optimizer: `sgd` or `adam`.
        learning_rate: Learning rate of the optimiser, above 0.
        momentum: Momentum of `sgd`, in [0, 1).
        nesterov: Whether `sgd` uses Nesterov momentum.
        weight_decay: Weight decay of the optimiser, at least 0.
        participation_ratio: Share of the present devices that a round selects, in (0, 1]; at least one device.
        robust: How the server treats devices that are far from the others: `gross` bounds their weight and leaves
            out values that no honest device sends, `strict` also tests class statistics more narrowly, `off` accepts
            everything.
    """

    keeps_optimizer: ClassVar[bool] = False
    """Whether a device keeps its optimiser, with its momentum, between rounds; otherwise each round has a new one."""

    sums_securely: ClassVar[bool] = False
    """Whether the devices' statistics leave them only in secure sums."""

    usual_rounds: ClassVar[int] = 30
    """Default number of rounds of a simulation; 1 for a method that completes in one round."""

    examples: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """A value for each setting that has no default, with which tables describe the method."""

    control: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that leave out what is the method's own; a comparison without such an entry says so."""

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
    def from_settings(cls, given: Mapping[str, Any]) -> Self:
        """Returns the configuration for an operator's settings.

        Args:
            given: Settings by name. An omitted setting has our default or, with `paper` true, the paper's value.

        Raises:
            ConfigurationError: A value is out of its range.
            TypeError: A setting is unknown.
        """
        papers = {"robust": "off", **cls.paper_values(given)} if given.get("paper") is True else {}
        return cls(**{**papers, **given})

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's values of the settings whose defaults differ from the paper.

        `from_settings` adds `robust = "off"`, because none of the papers has it.

        Args:
            given: The operator's settings, for values that depend on them.
        """
        return {}

    @property
    def guarantee(self) -> Guarantee | None:
        """The guarantee of the devices' answers; None if they are not private."""
        return None

    @property
    def hides_rows(self) -> bool:
        """Whether the server learns neither how many rows a device has nor any figure of one device."""
        return self.guarantee is not None or self.sums_securely

    def device_mu(self, devices: int) -> float:
        """Returns the Gaussian-DP parameter that one device's private statistics have in a merge of so many devices."""
        raise NotImplementedError

    def reveals(self) -> str:
        """Returns what answers with these settings reveal of single samples, one sentence; empty if it is little.

        A device emits it when it checks in. `fleetdistill audit` measures it.
        """
        return ""

    def for_classes(self, classes: int) -> Self:
        """Returns this configuration with the defaults that depend on the number of classes filled in; by default none.

        Raises:
            ConfigurationError: A setting is out of its range for so many classes.
        """
        return self

    def cross_entropy_epochs(self, participation: int) -> int:
        """Returns the epochs on labels in a device's n-th round, counted from 1; controls train for equally many."""
        return self.local_epochs

    def local_rate(self, number: int) -> float:
        """Returns the learning rate of local training in a round, counted from 1; controls use the same rate."""
        return self.learning_rate


def make_local_optimizer(config: LocalTraining, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns a new optimiser for the parameters, as the configuration sets it."""
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
