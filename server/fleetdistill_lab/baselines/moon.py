"""MOON: FedAvg with a contrast between the global model's representation and the device's previous one.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Ask, Local, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.model import check_embedding, logits_and_embedding
from fleetdistill_lab.baselines.shared import embeddings_of, frozen_copy, register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["MOONConfig", "MOONDevice", "MOONServer", "contrastive_loss"]

_EPSILON = 1e-8
"""Smallest norm of a representation in a cosine."""


@dataclass(frozen=True, kw_only=True)
class MOONConfig(FedAvgConfig):
    """Settings of MOON in addition to those of FedAvg.

    Attributes:
        mu: Weight of the contrastive term, at least 0; the paper tries 0.001 to 10. With 0 it is FedAvg.
        contrast_temperature: The paper's tau, above 0.
    """

    mu: float = 1.0
    contrast_temperature: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mu", self.mu, 0)
        check_range("contrast_temperature", self.contrast_temperature, 0, open_low=True)


class MOONDevice(FedAvgDevice):
    """Device half of MOON: draws its representation to the global model's, and away from that of its own last model.

    The representation is the input of the last layer; the model has the projection of the paper if it needs one. The
    first time that a device takes part, its last model is the global one, and the term is constant.

    Raises:
        ModelError: The app's model has no `embedding` method.
    """

    config: MOONConfig

    def __init__(self, config: MOONConfig, local: Local) -> None:
        check_embedding(local.model, "MOON")
        super().__init__(config, local)
        self._last: dict[str, Tensor] | None = None

    def begin(self, ask: Ask) -> None:
        self._global = frozen_copy(self.local.model)
        self._previous = frozen_copy(self.local.model, self._last)

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        logits_bc, own_bf = logits_and_embedding(self.local.model, inputs_b)
        with torch.no_grad():
            global_bf, previous_bf = (embeddings_of(model, inputs_b) for model in (self._global, self._previous))
        term = contrastive_loss(own_bf, global_bf, previous_bf, self.config.contrast_temperature)
        return functional.cross_entropy(logits_bc, labels_b) + self.config.mu * term

    def end(self, ask: Ask) -> Parts:
        self._last = {name: tensor.detach().clone() for name, tensor in self.local.model.state_dict().items()}
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._last is None else {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = state.get("last")


class MOONServer(FedAvgServer):
    """Server half of MOON: FedAvg's."""

    summary = "FedAvg; contrasts features with the last own model's"


def contrastive_loss(own_bf: Tensor, global_bf: Tensor, previous_bf: Tensor, temperature: float) -> Tensor:
    """Returns the mean over rows of -log(e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau))), with cosines s_g and s_p.

    Args:
        own_bf: Representations of the model in training, `[batch, features]`.
        global_bf, previous_bf: Those of the global and of the device's last model, constants.
        temperature: The paper's tau, above 0.
    """
    similarities_b2 = torch.stack(
        [functional.cosine_similarity(own_bf, other, dim=1, eps=_EPSILON) for other in (global_bf, previous_bf)], dim=1
    )
    positive_b = torch.zeros(len(own_bf), dtype=torch.int64, device=own_bf.device)
    return functional.cross_entropy(similarities_b2 / temperature, positive_b)


register("moon", MOONConfig, MOONDevice, MOONServer)
