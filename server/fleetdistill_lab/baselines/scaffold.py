"""SCAFFOLD: FedAvg with control variates that correct the direction of local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, algorithm 1, option II.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import ModelParameters, Parts
from fleetdistill.methods.base import Ask, Local, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_lab.baselines.shared import (
    CorrectedServer,
    inner_product,
    named_copies,
    of_parameters,
    received_tensors,
    register,
    sent_tensors,
)
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["SCAFFOLDConfig", "SCAFFOLDDevice", "SCAFFOLDServer"]


@dataclass(frozen=True, kw_only=True)
class SCAFFOLDConfig(FedAvgConfig):
    """Settings of SCAFFOLD in addition to those of FedAvg. Local training is plain SGD, without momentum.

    Attributes:
        server_rate: The paper's eta_g, above 0.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weighting: str = "uniform"
    server_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("server_rate", self.server_rate, 0, open_low=True)
        if self.optimizer != "sgd" or self.momentum:
            raise ConfigurationError(
                f"SCAFFOLD's control variates hold for plain SGD only, not for optimizer {self.optimizer!r} with "
                f"momentum {self.momentum:g}; leave both out"
            )


class SCAFFOLDDevice(FedAvgDevice):
    """Device half of SCAFFOLD: steps along the gradient - c_k + c, and keeps c_k."""

    config: SCAFFOLDConfig

    def __init__(self, config: SCAFFOLDConfig, local: Local) -> None:
        super().__init__(config, local)
        self._control = {name: torch.zeros_like(w) for name, w in local.model.named_parameters()}  # c_k

    def first_ask(self) -> Ask:
        ask = super().first_ask()
        return Ask(
            round=1, step="train", seed=0, parts={**ask.parts, "control": sent_tensors(self._control, "control")}
        )

    def begin(self, ask: Ask) -> None:
        self._start = named_copies(self.local.model)
        server = received_tensors(self.local.model, ask.part("control", ModelParameters))  # c
        self._correction = {name: one - self._control[name] for name, one in server.items()}

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns the cross-entropy + <c - c_k, w>, whose gradient is the corrected one."""
        term = inner_product((self._correction[name], w) for name, w in self.local.model.named_parameters())
        return super().loss(inputs_b, labels_b) + term

    def end(self, ask: Ask) -> Parts:
        """Returns the change of c_k, which becomes c_k - c + (w_t - w_k) / (K eta) after K steps."""
        assert self.trained is not None
        scale = 1 / (self.trained.steps * self.config.local_rate(ask.round))
        change = {
            name: (self._start[name] - w.detach()) * scale - self._correction[name] - self._control[name]
            for name, w in self.local.model.named_parameters()
        }
        self._control = {name: one + change[name] for name, one in self._control.items()}
        return {"control": sent_tensors(change, "control")}

    def state_dict(self) -> dict[str, Any]:
        return {"control": self._control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._control = {name: one.to(self.local.torch_device) for name, one in state["control"].items()}


class SCAFFOLDServer(CorrectedServer):
    """Server half of SCAFFOLD: averages models and changes of the control variates.

    Devices send w_k, not w_k - w_t: the mean is the same, and so are the bytes.
    """

    summary = "FedAvg; control variates correct the local steps"
    config: SCAFFOLDConfig

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange, 8W bytes of W parameters in each direction."""
        message = {
            "parameters": ModelParameters.schema(sizes.model),
            "control": ModelParameters.schema(of_parameters(sizes.model)),
        }
        return [Exchange(step="train", down=message, up=message)]

    def message(self) -> Parts:
        return {**super().message(), "control": sent_tensors(self.accumulated, "control")}

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        """Takes w + eta_g * mean of w_k - w, and c + |S| / N * mean of c_k's changes."""
        start = named_copies(self.model)
        super().update(cohort, received)
        change = received_tensors(self.model, self.mean(cohort, received, "control"))
        share = self.share(cohort, received)
        with torch.no_grad():
            for name, w in self.model.named_parameters():
                w.copy_(start[name] + self.config.server_rate * (w - start[name]))
                self.accumulated[name] = self.accumulated[name] + share * change[name]


register("scaffold", SCAFFOLDConfig, SCAFFOLDDevice, SCAFFOLDServer)
