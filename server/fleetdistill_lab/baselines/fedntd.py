"""FedLSD and FedNTD: FedAvg whose local training distils the received global model.

Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022; FedLSD is
from its first version, arXiv 2106.03097.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.baselines.shared import TaughtConfig, TaughtDevice, register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["FedLSDConfig", "FedLSDDevice", "FedLSDServer", "FedNTDConfig", "FedNTDDevice", "FedNTDServer"]


@dataclass(frozen=True, kw_only=True)
class FedLSDConfig(TaughtConfig):
    """Settings of FedLSD in addition to those of FedAvg.

    Attributes:
        mix: Whether cross-entropy has the weight 1 - beta, which is then at most 1; otherwise it has the weight 1.
    """

    mix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix and self.beta > 1:
            raise ConfigurationError(f"beta is {self.beta:g}, must be at most 1 with mix: cross-entropy has the rest")


@dataclass(frozen=True, kw_only=True)
class FedNTDConfig(TaughtConfig):
    """Settings of FedNTD in addition to those of FedAvg."""


class FedLSDDevice(TaughtDevice):
    """Device half of FedLSD: distils the received model over all classes."""

    config: FedLSDConfig

    def total(self, own: Tensor, distillation: Tensor) -> Tensor:
        return super().total((1 - self.config.beta) * own if self.config.mix else own, distillation)


class FedNTDDevice(TaughtDevice):
    """Device half of FedNTD: distils the received model over the classes other than a row's own."""

    config: FedNTDConfig

    def distillation(self, logits_bc: Tensor, teacher_bc: Tensor, labels_b: Tensor) -> Tensor:
        return super().distillation(not_true(logits_bc, labels_b), not_true(teacher_bc, labels_b), labels_b)


class FedLSDServer(FedAvgServer):
    """Server half of FedLSD: FedAvg's."""

    summary = "FedAvg; local training distils the global model"


class FedNTDServer(FedAvgServer):
    """Server half of FedNTD: FedAvg's."""

    summary = "FedLSD over the classes that are not a row's own"


def not_true(logits_bc: Tensor, labels_b: Tensor) -> Tensor:
    """Returns logits `[batch, classes - 1]` without the column of each row's own class."""
    rows, classes = logits_bc.shape
    others_bc = torch.arange(classes, device=labels_b.device) != labels_b[:, None]
    return logits_bc[others_bc].view(rows, classes - 1)


register("fedlsd", FedLSDConfig, FedLSDDevice, FedLSDServer)
register("fedntd", FedNTDConfig, FedNTDDevice, FedNTDServer)
