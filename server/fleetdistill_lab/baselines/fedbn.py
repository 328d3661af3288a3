"""FedBN: FedAvg whose batch-norm layers stay on the devices.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.parameters import batch_norm_names
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["FedBNConfig", "FedBNDevice", "FedBNServer"]


@dataclass(frozen=True, kw_only=True)
class FedBNConfig(FedAvgConfig):
    """Settings of FedBN, which are FedAvg's; the authors weight devices equally."""

    weighting: str = "uniform"


class FedBNDevice(FedAvgDevice):
    """Device half of FedBN: keeps scale, shift and statistics of every batch-norm layer."""

    shares_fleet_model = False

    def own_tensors(self) -> frozenset[str]:
        return batch_norm_names(self.local.model)


class FedBNServer(FedAvgServer):
    """Server half of FedBN: averages the other layers.

    Without statistics of its own the server's model cannot be scored; that of a network without batch-norm can.
    """

    summary = "FedAvg; batch-norm layers stay on the devices"

    def own_tensors(self) -> frozenset[str]:
        return batch_norm_names(self.model)

    def global_model(self) -> nn.Module | None:
        return None if self.own_tensors() else self.model

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        return None if self.own_tensors() else super().export()


register("fedbn", FedBNConfig, FedBNDevice, FedBNServer)
