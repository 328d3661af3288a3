"""No Transfer: every device trains alone, and nothing but metrics is exchanged.

The lower control of Le et al., CDKT-FL, 2023. Their server also trains a model of its own on a proxy set; this one has
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["NoTransferConfig", "NoTransferDevice", "NoTransferServer"]


@dataclass(frozen=True, kw_only=True)
class NoTransferConfig(FedAvgConfig):
    """Settings of No Transfer, which are FedAvg's; `weighting` has no effect."""


class NoTransferDevice(DeviceMethod):
    """Device half of No Transfer: trains its own model further."""

    config: NoTransferConfig

    @classmethod
    def metrics_steps(cls, config: NoTransferConfig) -> Sequence[str]:
        return ("train",)

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains for a round's local epochs from the device's own last model."""
        model, data = self.local.model, self.local.data.to(self.local.torch_device)
        optimizer = make_local_optimizer(self.config, model.parameters())
        losses = lambda epoch, rows_b: [functional.cross_entropy(model(data.draw(rows_b)), data.labels[rows_b])]  # noqa: E731
        self.train_local(losses, optimizer, ask.seed)
        return Answer(parts={}, samples=len(data))


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
