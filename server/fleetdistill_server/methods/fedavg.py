"""Server half of FedAvg: the weighted mean of the devices' models.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleetdistill.knowledge import ModelParameters, Weights
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedAvgServer"]


class FedAvgServer(ServerMethod):
    """Stores and averages the global model."""

    summary = "the weighted mean of the devices' models: the yardstick"

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.model = context.device_model().to(context.torch_device)

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(same_architecture=True)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange, 4W bytes of W parameters in each direction."""
        model = {"parameters": ModelParameters.schema(sizes.model)}
        return [Exchange(step="train", down=model, up=model)]

    def sizes(self) -> Sizes:
        return Sizes(classes=self.context.classes, model=Weights.of(model_parameters(self.model)))

    def initial(self) -> ModelParameters:
        return model_parameters(self.model)

    async def round(self, cohort: Cohort) -> None:
        mean = WeightedMean(self.config.robust)
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", {"parameters": model_parameters(self.model)}, to=asked):
            mean.add(answer.device, answer.part("parameters", ModelParameters), answer.weight)
        load_parameters(self.model, mean.result(cohort))  # w <- sum n_k / n * w_k

    async def finish(self, cohort: Cohort) -> None:
        await cohort.deliver({"parameters": model_parameters(self.model)})

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])

    def global_model(self) -> torch.nn.Module:
        return self.model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.model, self.context.input_shape
