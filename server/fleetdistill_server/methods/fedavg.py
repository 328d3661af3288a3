"""Server half of FedAvg: the weighted mean of the devices' models.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fleetdistill.knowledge import ModelParameters, Parts, Weights
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.traffic import Exchange, Sizes

__all__ = ["FedAvgServer"]


class FedAvgServer(ServerMethod):
    """Stores and averages the global model.

    A method that sends more with the model, or that does more with the answers than average them, overrides `message`,
    `update`, or `scope` and `own_tensors`.
    """

    summary = "the weighted mean of the devices' models: the yardstick"

    scope: ClassVar[str] = "model"
    """What devices share: the whole `model`, or its `extractor`, the layers below the cut."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        model = context.extractor() if self.scope == "extractor" else context.device_model()
        self.model = model.to(context.torch_device)

    @classmethod
    def needs(cls, config: Any) -> Needs:
        extractor_only = cls.scope == "extractor"
        return Needs(same_architecture=not extractor_only, same_extractor=extractor_only)

    def own_tensors(self) -> frozenset[str]:
        """Returns the names in the model's state dict of the tensors that stay on the devices; by default none."""
        return frozenset()

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchange, 4W bytes of W parameters in each direction."""
        model = {"parameters": ModelParameters.schema(sizes.model)}
        return [Exchange(step="train", down=model, up=model)]

    def sizes(self) -> Sizes:
        return Sizes(classes=self.context.classes, model=Weights.of(self._shared()))

    def initial(self) -> ModelParameters:
        return model_parameters(self.model, self.scope)

    async def round(self, cohort: Cohort) -> None:
        asked = cohort.sample(self.config.participation_ratio)
        self.update(cohort, [answer async for answer in cohort.ask("train", self.message(), to=asked)])

    def message(self) -> Parts:
        """Returns the parts that a round sends to its devices."""
        return {"parameters": self._shared()}

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        """Updates the global model from a round's answers, of which there is at least one."""
        load_parameters(self.model, self.mean(cohort, received, "parameters"), without=self.own_tensors())

    def mean(
        self, cohort: Cohort, received: Sequence[DeviceAnswer], part: str, names: Collection[str] | None = None
    ) -> ModelParameters:
        """Returns the devices' mean of a part, sum n_k / n * w_k, or with equal weights; of `names` only, if given."""
        mean = WeightedMean(self.config.robust)
        for answer in received:
            weight = answer.weight if self.config.weighting == "samples" else answer.decay
            sent = answer.part(part, ModelParameters)
            mean.add(answer.device, sent if names is None else sent.only(names), weight)
        return mean.result(cohort)

    async def finish(self, cohort: Cohort) -> None:
        await cohort.deliver({"parameters": self._shared()})

    def _shared(self) -> ModelParameters:
        return model_parameters(self.model, self.scope, without=self.own_tensors())

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])

    def global_model(self) -> torch.nn.Module | None:
        return self.model

    @property
    def has_global_model(self) -> bool:
        return self.global_model() is not None

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]] | None:
        return self.model, self.context.input_shape
