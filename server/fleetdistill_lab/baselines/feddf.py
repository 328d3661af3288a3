"""FedDF: FedAvg whose global model is then distilled from the devices' models on a proxy set.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.losses import distillation_loss
from fleetdistill_lab.baselines.shared import register, teachers_of
from fleetdistill_server.methods.base import Needs
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["FedDFConfig", "FedDFServer", "ensemble"]

ENSEMBLES = ("mean_logits", "mean_probs")


@dataclass(frozen=True, kw_only=True)
class FedDFConfig(FedAvgConfig):
    """Settings of FedDF in addition to those of FedAvg.

    Attributes:
        distil_steps: Steps on the proxy set after the average, at least 0. With 0 it is FedAvg.
        distil_rate: Adam's learning rate at the first step, above 0; it falls to 0 along a cosine.
        teacher: The devices' mean logits, as in the paper, or their mean probabilities.
    """

    weighting: str = "uniform"
    distil_steps: int = 100
    distil_rate: float = 1e-3
    teacher: str = "mean_logits"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("distil_steps", self.distil_steps, 0)
        check_range("distil_rate", self.distil_rate, 0, open_low=True)
        check_choice("teacher", self.teacher, ENSEMBLES)


class FedDFServer(FedAvgServer):
    """Server half of FedDF: averages the devices' models, then distils all of them into the mean.

    The number of steps is fixed: without labelled data there is no best step to keep.
    """

    summary = "FedAvg; the server distils the devices' models"
    config: FedDFConfig

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(same_architecture=True, server_proxy_set=True)

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        teachers = teachers_of(self.model, received)
        super().update(cohort, received)
        if self.config.distil_steps:
            self._distil(teachers, cohort)

    def _distil(self, teachers: Sequence[torch.nn.Module], cohort: Cohort) -> None:
        proxy = self.context.proxy
        assert proxy is not None  # make_contract rejects a run without a proxy set
        inputs, apply = proxy.inputs.to(self.context.torch_device), self.context.trainer.extract
        teacher_pc = ensemble(
            torch.stack([apply(teacher, proxy.inputs) for teacher in teachers]), self.config.teacher
        ).to(self.context.torch_device)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.distil_rate)
        steps_of_a_pass = math.ceil(len(inputs) / self.config.batch_size)
        taken = 0

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            nonlocal taken
            if taken == self.config.distil_steps:
                return []
            falling = (1 + math.cos(math.pi * taken / self.config.distil_steps)) / 2
            optimizer.param_groups[0]["lr"] = self.config.distil_rate * falling
            taken += 1
            return [distillation_loss(self.model(inputs[rows_b]), teacher_pc[rows_b], 1.0)]

        self.context.trainer.train_steps(
            self.model,
            len(inputs),
            epochs=math.ceil(self.config.distil_steps / steps_of_a_pass),
            batch_size=self.config.batch_size,
            optimizer=optimizer,
            losses=losses,
            generator=cohort.generator("distil"),
        )


def ensemble(logits_kpc: Tensor, kind: str) -> Tensor:
    """Returns the teachers' joint probabilities `[rows, classes]` for logits `[teachers, rows, classes]`."""
    return logits_kpc.mean(0).softmax(-1) if kind == "mean_logits" else logits_kpc.softmax(-1).mean(0)


register("feddf", FedDFConfig, FedAvgDevice, FedDFServer)
