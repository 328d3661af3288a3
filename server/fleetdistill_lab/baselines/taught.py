"""Device half of methods whose local loss also distils a frozen model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.methods.base import Ask, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill_lab.baselines.shared import frozen_copy

__all__ = ["TaughtConfig", "TaughtDevice"]


@dataclass(frozen=True, kw_only=True)
class TaughtConfig(FedAvgConfig):
    """Settings of distillation on the device in addition to those of FedAvg.

    Attributes:
        beta: Weight of the distillation loss, at least 0; with 0 it is FedAvg.
        temperature: The paper's tau, above 0.
    """

    beta: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        check_range("temperature", self.temperature, 0, open_low=True)


class TaughtDevice(FedAvgDevice):
    """Minimises cross-entropy + beta tau^2 KL(teacher || model), or cross-entropy alone without a teacher.

    Attributes:
        teacher: The round's teacher, in eval mode; None without one. `begin` sets it, by default to the received model.
    """

    config: TaughtConfig
    teacher: nn.Module | None = None

    def begin(self, ask: Ask) -> None:
        self.teacher = frozen_copy(self.local.model)

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        logits_bc = self.local.model(inputs_b)
        own = functional.cross_entropy(logits_bc, labels_b)
        if self.teacher is None:
            return own
        with torch.no_grad():
            teacher_bc = self.teacher(inputs_b)
        return self.total(own, self.distillation(logits_bc, teacher_bc, labels_b))

    def total(self, own: Tensor, distillation: Tensor) -> Tensor:
        """Returns the loss of a mini-batch from its cross-entropy and its distillation loss."""
        return own + self.config.beta * distillation

    def distillation(self, logits_bc: Tensor, teacher_bc: Tensor, labels_b: Tensor) -> Tensor:
        """Returns tau^2 KL(teacher || model), the mean over rows, from both models' logits `[batch, classes]`."""
        temperature = self.config.temperature
        return distillation_loss(logits_bc, soft_targets(teacher_bc, temperature), temperature)
