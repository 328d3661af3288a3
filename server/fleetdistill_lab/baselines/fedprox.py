"""FedProx: FedAvg whose local training stays close to the global model.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fleetdistill.methods.base import Ask, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_lab.baselines.shared import named_copies, register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["FedProxConfig", "FedProxDevice", "FedProxServer", "squared_distance"]


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(FedAvgConfig):
    """Settings of FedProx in addition to those of FedAvg.

    Attributes:
        mu: Weight of the proximal term, at least 0; the paper tries 0.001, 0.01, 0.1 and 1. With 0 it is FedAvg.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mu", self.mu, 0)


class FedProxDevice(FedAvgDevice):
    """Device half of FedProx: minimises F_k(w) + mu / 2 ||w - w_t||^2."""

    config: FedProxConfig

    def begin(self, ask: Ask) -> None:
        self._start = named_copies(self.local.model)  # w_t

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        distance = squared_distance(self.local.model, self._start)
        return super().loss(inputs_b, labels_b) + self.config.mu / 2 * distance


class FedProxServer(FedAvgServer):
    """Server half of FedProx: FedAvg's."""

    summary = "FedAvg; local training stays close to the global model"


def squared_distance(model: nn.Module, start: dict[str, Tensor]) -> Tensor:
    """Returns ||w - start||^2, summed over all trainable parameters; buffers do not count."""
    return torch.stack([((w - start[name]) ** 2).sum() for name, w in model.named_parameters()]).sum()


register("fedprox", FedProxConfig, FedProxDevice, FedProxServer)
