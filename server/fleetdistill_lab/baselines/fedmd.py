"""FedMD: devices with different models agree on logits of a proxy set.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS workshop 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import Parts, ProxyKnowledge
from fleetdistill.methods.base import Ask, check_choice, check_range
from fleetdistill_lab.baselines.proxy import ProxyConfig, ProxyDevice, ProxyServer, soft_loss
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.cohort import Cohort

__all__ = ["FedMDConfig", "FedMDDevice", "FedMDServer"]

CHOICES = {"digest_loss": ("mae_logits", "mse_logits", "kl"), "combine": ("mean_logits", "mean_probs")}
_TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class FedMDConfig(ProxyConfig):
    """Settings of FedMD in addition to those of methods with a proxy set.

    Attributes:
        start_epochs: Passes over the labelled proxy set in a device's first round, at least 1.
        digest_loss: Loss towards the consensus: mean absolute error of logits, their mean squared error, or `kl`.
        combine: The consensus: the mean of the devices' logits, or of their probabilities.
        temperature: Temperature of `kl`, above 0.
    """

    start_epochs: int = 5
    digest_loss: str = "mae_logits"
    combine: str = "mean_logits"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("start_epochs", self.start_epochs, 1)
        check_range("temperature", self.temperature, 0, open_low=True)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)


class FedMDDevice(ProxyDevice):
    """Device half of FedMD: starts once, then in each round digests the consensus and revisits its own rows."""

    config: FedMDConfig
    _has_started = False

    def begin(self, ask: Ask) -> None:
        if not self._has_started:
            self.start(ask)
        super().begin(ask)

    def start(self, ask: Ask) -> None:
        """Trains on the labels of the proxy set, then on the device's own rows."""
        loss = lambda own_bc, rows_b: functional.cross_entropy(own_bc, self.proxy_labels(rows_b))  # noqa: E731
        self.fit_proxy(ask, self.config.start_epochs, loss)
        if ask.part("knowledge", ProxyKnowledge).valid:
            self.fit(ask)  # without a consensus the round's own training follows at once

    def end(self, ask: Ask) -> Parts:
        self._has_started = True
        return super().end(ask)

    def state_dict(self) -> dict[str, Any]:
        return {"has_started": self._has_started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_started = bool(state["has_started"])

    def proxy_loss(self, own_bc: Tensor, rows_b: Tensor, logits_pc: Tensor) -> Tensor:
        if self.config.digest_loss == "mae_logits":
            return functional.l1_loss(own_bc, logits_pc[rows_b])
        if self.config.digest_loss == "mse_logits":
            return functional.mse_loss(own_bc, logits_pc[rows_b])
        return soft_loss(own_bc, logits_pc[rows_b], self.config.temperature)


class FedMDServer(ProxyServer):
    """Server half of FedMD: averages logits; it has no model."""

    summary = "agrees on outputs for a labelled set, averaged"
    config: FedMDConfig

    def combine(self, cohort: Cohort, received: Mapping[str, Tensor], weights: Sequence[float]) -> Tensor:
        """Returns the consensus as logits; of mean probabilities their logarithm."""
        of_probabilities = self.config.combine == "mean_probs"
        mean = TensorMean(self.config.robust, probabilities=of_probabilities)
        for logits_pc, weight in zip(received.values(), weights, strict=True):
            mean.add(logits_pc.softmax(dim=1) if of_probabilities else logits_pc, weight)
        result = mean.result()
        assert result is not None
        return result.clamp_min(_TINY).log() if of_probabilities else result


register("fedmd", FedMDConfig, FedMDDevice, FedMDServer)
