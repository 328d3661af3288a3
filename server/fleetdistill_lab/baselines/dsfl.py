"""DS-FL: devices and server distil on sharpened mean predictions of an unlabelled proxy set.

Itahara et al., Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative Training
with Non-IID Private Data, IEEE Transactions on Mobile Computing 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.methods.base import check_range
from fleetdistill_lab.baselines.proxy import ProxyConfig, ProxyDevice, ProxyServer, soft_loss
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.base import MethodContext, Needs
from fleetdistill_server.methods.cohort import Cohort

__all__ = ["DSFLConfig", "DSFLDevice", "DSFLServer"]


@dataclass(frozen=True, kw_only=True)
class DSFLConfig(ProxyConfig):
    """Settings of DS-FL in addition to those of methods with a proxy set.

    Attributes:
        era_temperature: The paper's T, above 0: below 1 the softmax of mean probabilities / T has less entropy.
        server_epochs: The server's passes over the proxy set in a round, at least 1.
    """

    era_temperature: float = 0.1
    server_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("era_temperature", self.era_temperature, 0, open_low=True)
        check_range("server_epochs", self.server_epochs, 1)


class DSFLDevice(ProxyDevice):
    """Device half of DS-FL: distils the sharpened predictions, then trains on its own rows."""

    def proxy_loss(self, own_bc: Tensor, rows_b: Tensor, logits_pc: Tensor) -> Tensor:
        return soft_loss(own_bc, logits_pc[rows_b])


class DSFLServer(ProxyServer):
    """Server half of DS-FL: sharpens the mean prediction (entropy reduction aggregation) and distils it."""

    summary = "distils sharpened mean outputs on an unlabelled set"
    config: DSFLConfig

    def __init__(self, config: DSFLConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.model = context.global_model().to(context.torch_device)

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(proxy_set=True, server_reads_inputs=True)

    def combine(self, cohort: Cohort, received: Mapping[str, Tensor], weights: Sequence[float]) -> Tensor:
        """Returns mean probabilities / T: their softmax is the sharpened prediction."""
        mean = TensorMean(self.config.robust, probabilities=True)
        for logits_pc, weight in zip(received.values(), weights, strict=True):
            mean.add(logits_pc.softmax(dim=1), weight)
        probs_pc = mean.result()
        assert probs_pc is not None
        teacher_pc = (probs_pc / self.config.era_temperature).float()
        on_device = teacher_pc.to(self.context.torch_device)
        loss = lambda own_bc, rows_b: soft_loss(own_bc, on_device[rows_b])  # noqa: E731
        self.fit_proxy(cohort, self.model, self.config.server_epochs, loss)
        return teacher_pc

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])

    def global_model(self) -> torch.nn.Module:
        return self.model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.model, self.context.input_shape


register("dsfl", DSFLConfig, DSFLDevice, DSFLServer)
