"""FedGKD: FedAvg whose local training distils the mean of the last global models.

Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID Data, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.knowledge import Kind, ModelParameters, Parts, Plan
from fleetdistill.methods.base import Ask, check_range
from fleetdistill.training.parameters import model_parameters, take_weights
from fleetdistill_lab.baselines.shared import TaughtConfig, TaughtDevice, frozen_copy, register
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedGKDConfig", "FedGKDDevice", "FedGKDServer"]


@dataclass(frozen=True, kw_only=True)
class FedGKDConfig(TaughtConfig):
    """Settings of FedGKD in addition to those of FedAvg; `beta` is the paper's kappa.

    Attributes:
        models: The paper's M, number of global models whose mean teaches, at least 1.
    """

    weighting: str = "uniform"
    beta: float = 0.1
    models: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("models", self.models, 1)


class FedGKDDevice(TaughtDevice):
    """Device half of FedGKD: distils the server's teacher, or with M = 1 the received model; in round 1 nothing."""

    config: FedGKDConfig

    def first_ask(self) -> Ask:
        parts = {**super().first_ask().parts, "plan": Plan(values={"teaches": False})}
        return Ask(round=1, step="train", seed=0, parts=parts)

    def begin(self, ask: Ask) -> None:
        self.teacher = frozen_copy(self.local.model) if ask.setting("teaches", bool) else None
        if self.teacher is not None and self.config.models > 1:
            take_weights(self.teacher, ask.part("teacher", ModelParameters))


class FedGKDServer(FedAvgServer):
    """Server half of FedGKD: remembers the last M global models, and sends their mean if M > 1."""

    summary = "FedAvg; the mean of the last global models teaches"
    config: FedGKDConfig

    def __init__(self, config: FedGKDConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self._last: list[dict[str, Tensor]] = []  # state dicts of the global model after the last M rounds

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange, 4W bytes of W parameters up, and 4W or, with M > 1, 8W down."""
        model = ModelParameters.schema(sizes.model)
        teacher = {"teacher": model} if config.models > 1 else {}
        return [Exchange(step="train", down={"parameters": model, **teacher}, up={"parameters": model})]

    def message(self) -> Parts:
        plan = Plan(values={"teaches": bool(self._last)})
        teacher: dict[str, Kind] = {}
        if self._last and self.config.models > 1:
            mean = frozen_copy(self.model, mean_state(self._last))
            teacher = {"teacher": model_parameters(mean, "teacher")}
        return {**super().message(), "plan": plan, **teacher}

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        super().update(cohort, received)
        now = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        self._last = [*self._last, now][-self.config.models :]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        where = self.context.torch_device
        self._last = [{name: one.to(where) for name, one in model.items()} for model in state["last"]]


def mean_state(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the mean of one or more state dicts of a model; batch-norm's buffers are averaged too."""
    return {
        name: torch.stack([model[name].double() for model in models]).mean(dim=0).to(one.dtype)
        for name, one in models[0].items()
    }


register("fedgkd", FedGKDConfig, FedGKDDevice, FedGKDServer)
