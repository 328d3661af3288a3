"""The copies of FedD2S's global network, each trained on one device's triplets, and their mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetdistill.knowledge import ModelParameters
from fleetdistill_server.methods.averaging import WeightedMean


@dataclass(frozen=True)
class Copy:
    """A copy of the global network, trained on one device's triplets.

    Attributes:
        device: Id of the device.
        rows: Number of the triplets.
        accuracy: Accuracy of p (the head applied to H_l), in [0, 1].
        parameters: The copy's weights.
    """

    device: str
    rows: int
    accuracy: float
    parameters: ModelParameters


@dataclass
class Copies:
    """The mean of the global network's copies, each trained on one device's triplets.

    Attributes:
        mean: Mean of the copies' weights.
        by_samples: Whether a copy's weight is its device's row count; otherwise all weights are 1.
        accuracies: Accuracy of p (the head applied to H_l), in [0, 1], of each device whose copy is in the mean.
    """

    mean: WeightedMean
    by_samples: bool
    accuracies: dict[str, float] = field(default_factory=dict)

    def add(self, copy: Copy | None) -> None:
        """Adds one copy; ignores None, which stands for a copy whose training failed."""
        if copy is not None:
            self.mean.add(copy.device, copy.parameters, copy.rows if self.by_samples else 1)
            self.accuracies[copy.device] = copy.accuracy
