"""FedGKT: devices send features and logits, a server model learns from both and teaches the devices its logits.

He, Annavaram and Avestimehr, Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge, NeurIPS 2020. It
is FedDKC without refinement: rows are paired by their ids, and the server computes its logits after training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_range
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.feddkc.device import FedDKCDevice
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.feddkc.server import FedDKCServer

__all__ = ["FedGKTConfig", "FedGKTServer"]


@dataclass(frozen=True, kw_only=True)
class FedGKTConfig(FedDKCConfig):
    """Settings of FedGKT in addition to those of FedDKC; the weights are those of the authors' code with alpha = 1.5.

    FedDKC's guard is off by default: it would withhold what a weak server model teaches, which FedGKT does not.

    `paper` selects FedGKT as the paper of FedDKC has it: a cross-entropy of weight 1 and `beta` on both sides.

    Attributes:
        ce_weight: Weight of the device's cross-entropy, at least 0.
        server_ce_weight: Weight of the server's cross-entropy, at least 0.
    """

    refinement: str = "none"
    server_beta: float = 1.0
    server_order: str = "sequential"
    teacher_guard: bool = False
    ce_weight: float = 1.0
    server_ce_weight: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ce_weight", "server_ce_weight"):
            check_range(name, getattr(self, name), 0)
        if self.refinement != "none":
            raise ConfigurationError(f"refinement is {self.refinement!r}, but this method has none; use feddkc for it")

    @property
    def label_weights(self) -> tuple[float, float]:
        return self.ce_weight, self.server_ce_weight

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().paper_values(given), "server_ce_weight": 1.0}


class FedGKTServer(FedDKCServer):
    """Server half of FedGKT: FedDKC's."""

    summary = "distils features and logits, and teaches back"


register("fedgkt", FedGKTConfig, FedDKCDevice, FedGKTServer)
