"""pFedSD: FedAvg for personal models, each taught by the device's own last one.

Jin et al., Personalized Edge Intelligence via Federated Self-Knowledge Distillation, IEEE TPDS 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Answer, Ask, answers
from fleetdistill_lab.baselines.shared import TaughtConfig, TaughtDevice, frozen_copy, register
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["PFedSDConfig", "PFedSDDevice", "PFedSDServer"]


@dataclass(frozen=True, kw_only=True)
class PFedSDConfig(TaughtConfig):
    """Settings of pFedSD in addition to those of FedAvg; `beta` is the paper's lambda."""

    weighting: str = "uniform"


class PFedSDDevice(TaughtDevice):
    """Device half of pFedSD: the local model, as its last training left it, teaches and is the personal model."""

    config: PFedSDConfig
    shares_fleet_model = False
    _has_trained = False

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains the global model, taught by the device's last own model; the first time without a teacher."""
        self.teacher = frozen_copy(self.local.model) if self._has_trained else None
        return super().train(ask)

    def begin(self, ask: Ask) -> None:
        """Keeps the teacher, which was taken before the global model was loaded."""

    def end(self, ask: Ask) -> Parts:
        self._has_trained = True
        return {}

    def fleet_model(self, ask: Ask) -> None:
        """Returns None: the device keeps its own model."""

    def state_dict(self) -> dict[str, Any]:
        return {"has_trained": self._has_trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_trained = bool(state["has_trained"])


class PFedSDServer(FedAvgServer):
    """Server half of pFedSD: FedAvg's, which delivers nothing at the end."""

    summary = "FedAvg; each device's last own model teaches its next"

    async def finish(self, cohort: Cohort) -> None:
        """Delivers nothing: the devices keep their own models."""


register("pfedsd", PFedSDConfig, PFedSDDevice, PFedSDServer)
