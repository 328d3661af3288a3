"""FedDyn: FedAvg with a dynamic regulariser that makes the devices' optima agree.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Ask, Local, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_lab.baselines.fedprox import squared_distance
from fleetdistill_lab.baselines.shared import CorrectedServer, inner_product, named_copies, register
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer

__all__ = ["FedDynConfig", "FedDynDevice", "FedDynServer"]


@dataclass(frozen=True, kw_only=True)
class FedDynConfig(FedAvgConfig):
    """Settings of FedDyn in addition to those of FedAvg.

    Attributes:
        alpha: Weight of the regulariser, above 0; the paper has 0.001 to 0.1.
    """

    weighting: str = "uniform"
    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("alpha", self.alpha, 0, open_low=True)


class FedDynDevice(FedAvgDevice):
    """Device half of FedDyn: minimises F_k(w) - <g_k, w> + alpha / 2 ||w - w_t||^2, and keeps g_k."""

    config: FedDynConfig

    def __init__(self, config: FedDynConfig, local: Local) -> None:
        super().__init__(config, local)
        self._gradient = {name: torch.zeros_like(w) for name, w in local.model.named_parameters()}  # g_k

    def begin(self, ask: Ask) -> None:
        self._start = named_copies(self.local.model)  # w_t

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        model = self.local.model
        linear = inner_product((self._gradient[name], w) for name, w in model.named_parameters())
        return super().loss(inputs_b, labels_b) - linear + self.config.alpha / 2 * squared_distance(model, self._start)

    def end(self, ask: Ask) -> Parts:
        for name, w in self.local.model.named_parameters():
            self._gradient[name] = self._gradient[name] - self.config.alpha * (w.detach() - self._start[name])
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"gradient": self._gradient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gradient = {name: one.to(self.local.torch_device) for name, one in state["gradient"].items()}


class FedDynServer(CorrectedServer):
    """Server half of FedDyn: subtracts the accumulated drift h / alpha from the mean."""

    summary = "FedAvg; a regulariser makes the devices' optima agree"
    config: FedDynConfig

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        """Takes h - alpha / N * sum of w_k - w, and then the mean of w_k - h / alpha."""
        start = named_copies(self.model)
        super().update(cohort, received)
        scale = self.config.alpha * self.share(cohort, received)
        with torch.no_grad():
            for name, mean in self.model.named_parameters():
                drift = self.accumulated[name] - scale * (mean.double() - start[name].double())
                mean.copy_(mean.double() - drift / self.config.alpha)
                self.accumulated[name] = drift


register("feddyn", FedDynConfig, FedDynDevice, FedDynServer)
