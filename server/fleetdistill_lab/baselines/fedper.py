"""FedPer and FedRep: FedAvg of the layers below the cut; the head, the layers above it, stays on the device.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019; Collins et al., Exploiting Shared
Representations for Personalized Federated Learning, ICML 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import Ask, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = [
    "FedPerConfig",
    "FedPerDevice",
    "FedPerServer",
    "FedRepConfig",
    "FedRepDevice",
    "FedRepServer",
    "train_head_then_base",
]


@dataclass(frozen=True, kw_only=True)
class FedPerConfig(FedAvgConfig):
    """Settings of FedPer, which are FedAvg's."""


@dataclass(frozen=True, kw_only=True)
class FedRepConfig(FedAvgConfig):
    """Settings of FedRep in addition to those of FedAvg.

    Attributes:
        base_epochs: The paper's tau_b, the last of the `local_epochs`, which train the base; those before train the
            head, at least one. The authors have 1 of 5.
    """

    base_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("base_epochs", self.base_epochs, 1)
        if self.base_epochs >= self.local_epochs:
            raise ConfigurationError(
                f"base_epochs is {self.base_epochs} of {self.local_epochs} local_epochs, which leaves none for the "
                "head; raise local_epochs or lower base_epochs"
            )


class FedPerDevice(FedAvgDevice):
    """Device half of FedPer: trains base and head together, sends the base and keeps the head."""

    scope = "extractor"
    shares_fleet_model = False


class FedRepDevice(FedPerDevice):
    """Device half of FedRep: trains the head on the received base, then the base below the trained head."""

    config: FedRepConfig

    def fit(self, ask: Ask) -> None:
        train_head_then_base(self, ask, self.local.taps.extractor.modules(), self.config)


class FedPerServer(FedAvgServer):
    """Server half of FedPer: averages the bases, without a model of its own that could be scored."""

    summary = "FedAvg below the cut; heads stay on the devices"
    scope = "extractor"

    def networks(self) -> Mapping[str, nn.Module]:
        return {"extractor": self.model}

    def global_model(self) -> None:
        return None

    def export(self) -> None:
        return None


class FedRepServer(FedPerServer):
    """Server half of FedRep: FedPer's."""

    summary = "FedPer; devices train their heads first, then the base"


def train_head_then_base(half: FedAvgDevice, ask: Ask, base: Iterable[nn.Module], config: FedRepConfig) -> None:
    """Trains the head above a fixed base, then the base below the fixed head, with a new optimiser for each.

    Args:
        half: The device half.
        ask: The ask.
        base: All modules of the base; the head has the model's other ones.
        config: The epochs of both phases.
    """
    below = set(base)
    half.train_part(ask, without=below, epochs=config.local_epochs - config.base_epochs)
    half.train_part(ask, without=set(half.local.model.modules()) - below, epochs=config.base_epochs)


register("fedper", FedPerConfig, FedPerDevice, FedPerServer)
register("fedrep", FedRepConfig, FedRepDevice, FedRepServer)
