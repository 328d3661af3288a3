"""Settings of FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill.methods.local import LocalTraining

__all__ = ["FedAvgConfig"]


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(LocalTraining):
    """Settings of FedAvg, which are those of local training. `participation_ratio` is the paper's C.

    Each round starts with a new optimiser.
    """

    learning_rate: float = 0.02
    weight_decay: float = 0.0

    def for_classes(self, classes: int) -> FedAvgConfig:
        """Returns this configuration: no setting depends on the number of classes."""
        return self
