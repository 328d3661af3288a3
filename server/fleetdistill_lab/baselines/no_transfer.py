"""No Transfer: every device trains alone, and nothing but metrics is exchanged.

The lower control of Le et al., CDKT-FL, 2023. Their server also trains a model of its own on a proxy set; this one has
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill_lab.baselines.shared import OwnModelDevice, register
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["NoTransferConfig", "NoTransferDevice", "NoTransferServer"]


@dataclass(frozen=True, kw_only=True)
class NoTransferConfig(FedAvgConfig):
    """Settings of No Transfer, which are FedAvg's; `weighting` has no effect."""


class NoTransferDevice(OwnModelDevice):
    """Device half of No Transfer: trains its own model further, and sends nothing."""


class NoTransferServer(ServerMethod):
    """Server half of No Transfer: counts rounds."""

    summary = "every device trains alone: the lower control"

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        return [Exchange(step="train")]

    async def round(self, cohort: Cohort) -> None:
        async for _ in cohort.ask("train", to=cohort.sample(self.config.participation_ratio)):
            pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores nothing: a round depends on no other."""


register("no_transfer", NoTransferConfig, NoTransferDevice, NoTransferServer)
