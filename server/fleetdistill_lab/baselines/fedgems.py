"""FedGEMS: a server model learns from the devices that are right, and teaches them back, on a labelled proxy set.

Cheng et al., FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge Fusion, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.methods.base import check_range
from fleetdistill_lab.baselines.dsfl import DSFLServer
from fleetdistill_lab.baselines.proxy import ProxyConfig, ProxyDevice, soft_loss
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.cohort import Cohort

__all__ = ["FedGEMSConfig", "FedGEMSDevice", "FedGEMSServer", "fuse"]

_MIN_ENTROPY = 1e-8


@dataclass(frozen=True, kw_only=True)
class FedGEMSConfig(ProxyConfig):
    """Settings of FedGEMS in addition to those of methods with a proxy set.

    Attributes:
        label_share: The paper's epsilon, in [0, 1]: share of the labels in the losses that also have a teacher.
        server_epochs: The server's passes over the proxy set in a round, at least 1.
    """

    label_share: float = 0.75
    server_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("label_share", self.label_share, 0, 1 + 1e-9)
        check_range("server_epochs", self.server_epochs, 1)


class FedGEMSDevice(ProxyDevice):
    """Device half of FedGEMS: learns from the labels of the proxy set and from the server's logits."""

    config: FedGEMSConfig

    def proxy_loss(self, own_bc: Tensor, rows_b: Tensor, logits_pc: Tensor) -> Tensor:
        share, labels_b = self.config.label_share, self.proxy_labels(rows_b)
        return share * functional.cross_entropy(own_bc, labels_b) + (1 - share) * soft_loss(own_bc, logits_pc[rows_b])


class FedGEMSServer(DSFLServer):
    """Server half of FedGEMS: keeps, for each row, the last logits with which its model was right.

    Devices send logits of all rows; the paper's server asks for those that it needs in an exchange of its own.
    """

    summary = "a server model learns from devices that are right"
    config: FedGEMSConfig  # type: ignore[assignment]

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        rows = self.sizes().proxy_samples
        self._pool_pc = torch.zeros(rows, context.classes)
        self._pooled_p = torch.zeros(rows, dtype=torch.bool)

    def combine(self, cohort: Cohort, received: Mapping[str, Tensor], weights: Sequence[float]) -> Tensor:
        """Trains the server model and returns its logits of the proxy set."""
        labels_p, where = self.proxy().labels, self.context.torch_device
        fused_pc, is_known_p = fuse(torch.stack(list(received.values())), labels_p)
        pool_pc, pooled_p = self._pool_pc.to(where), self._pooled_p.to(where)
        fused_pc, is_known_p, labels_p = fused_pc.to(where), is_known_p.to(where), labels_p.to(where)

        def loss(own_bc: Tensor, rows_b: Tensor) -> Tensor:
            right_b = own_bc.argmax(1) == labels_p[rows_b]
            pool_pc[rows_b[right_b]] = own_bc.detach()[right_b].float()
            pooled_p[rows_b[right_b]] = True
            teacher_bc = torch.where(pooled_p[rows_b, None], pool_pc[rows_b], fused_pc[rows_b])
            has_teacher_b = ~right_b & (pooled_p | is_known_p)[rows_b]
            hard_b = functional.cross_entropy(own_bc, labels_p[rows_b], reduction="none")
            soft_b = functional.kl_div(
                own_bc.log_softmax(1), teacher_bc.log_softmax(1), reduction="none", log_target=True
            ).sum(1)
            share = self.config.label_share
            return torch.where(has_teacher_b, share * hard_b + (1 - share) * soft_b, hard_b).mean()

        self.fit_proxy(cohort, self.model, self.config.server_epochs, loss)
        self._pool_pc, self._pooled_p = pool_pc.cpu(), pooled_p.cpu()
        return self.context.trainer.extract(self.model, self.proxy().inputs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pool": self._pool_pc, "pooled": self._pooled_p}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pool_pc, self._pooled_p = state["pool"], state["pooled"]


def fuse(logits_kpc: Tensor, labels_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean logits of the devices that are right on a row, weighted by 1 / entropy.

    Args:
        logits_kpc: Logits `[devices, rows, classes]`.
        labels_p: Labels `[rows]`.

    Returns:
        Logits `[rows, classes]`, and whether any device is right `[rows]`; logits of other rows are 0.
    """
    log_probs_kpc = logits_kpc.log_softmax(-1)
    entropy_kp = (-log_probs_kpc.exp() * log_probs_kpc).sum(-1).clamp_min(_MIN_ENTROPY)
    right_kp = logits_kpc.argmax(-1) == labels_p
    weights_kp = right_kp / entropy_kp
    total_p = weights_kp.sum(0)
    shares_kp = weights_kp / total_p.clamp_min(torch.finfo(total_p.dtype).tiny)
    return (shares_kp[..., None] * logits_kpc).sum(0), total_p > 0


register("fedgems", FedGEMSConfig, FedGEMSDevice, FedGEMSServer)
