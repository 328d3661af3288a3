"""Settings of FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill.methods.base import check_choice, check_share
from fleetdistill.methods.local import LocalTraining

__all__ = ["FedAvgConfig"]

WEIGHTINGS = ("samples", "uniform")


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(LocalTraining):
    """Settings of FedAvg in addition to those of local training. `participation_ratio` is the paper's C.

    Each round starts with a new optimiser.

    Attributes:
        learning_rate_round_decay: Factor of the local learning rate from round to round, in (0, 1].
        weighting: Weights of the devices in the mean: their `samples`, or `uniform`.
    """

    learning_rate: float = 0.02
    weight_decay: float = 0.0
    learning_rate_round_decay: float = 1.0
    weighting: str = "samples"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("learning_rate_round_decay", self.learning_rate_round_decay)
        check_choice("weighting", self.weighting, WEIGHTINGS)

    def local_rate(self, number: int) -> float:
        """Returns the local learning rate in a round, counted from 1."""
        return self.learning_rate * self.learning_rate_round_decay ** (number - 1)
