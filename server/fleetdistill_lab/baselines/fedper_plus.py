"""FedPer+ and FedRep+: FedPer and FedRep whose cut falls, layer by layer, as a device takes part.

Atapour et al., FedD2S: Personalized Data-Free Federated Knowledge Distillation, 2024, compare with them without a
definition. The rules are ours and follow FedD2S's schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fleetdistill.errors import ConfigurationError, ModelError, WireError
from fleetdistill.knowledge import ModelParameters, Parts, Plan
from fleetdistill.methods.base import Ask, Local, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill_lab.baselines.fedper import FedRepConfig, train_head_then_base
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.fedd2s.schedule import distillation_layer, shallowest_layer

__all__ = [
    "FedPerPlusConfig",
    "FedPerPlusDevice",
    "FedPerPlusServer",
    "FedRepPlusConfig",
    "FedRepPlusDevice",
    "FedRepPlusServer",
]


@dataclass(frozen=True, kw_only=True)
class FedPerPlusConfig(FedAvgConfig):
    """Settings of FedPer+ in addition to those of FedAvg.

    Attributes:
        drop_every: Z_0, a device's rounds with the same cut, at least 1; then the cut is one layer lower. A value above
            the number of rounds is FedAvg.
        l_min: Lowest cut, from 1; None means that `dropping_set` sets it.
        dropping_set: Comma-separated names of the stages to drop, the model's last ones; empty for those from the
            first fully connected stage on.
    """

    drop_every: int = 3
    l_min: int | None = None
    dropping_set: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("drop_every", self.drop_every, 1)
        if self.l_min is not None and self.dropping_set:
            raise ConfigurationError("l_min and dropping_set both set the lowest cut; set one of them")


@dataclass(frozen=True, kw_only=True)
class FedRepPlusConfig(FedPerPlusConfig, FedRepConfig):
    """Settings of FedRep+: those of FedPer+ and FedRep."""


class FedPerPlusDevice(FedAvgDevice):
    """Device half of FedPer+: trains all layers, shares those up to the ask's depth l_k and keeps the others.

    Raises:
        ModelError: The app's model is not a `SplitModel`.
    """

    shares_fleet_model = False

    def __init__(self, config: FedPerPlusConfig, local: Local) -> None:
        super().__init__(config, local)
        self._stages = layered(local.model).stages
        self._depth = len(self._stages)  # l_k of the ask that is handled

    def first_ask(self) -> Ask:
        parts = {**super().first_ask().parts, "plan": Plan(values={"depth": self._depth})}
        return Ask(round=1, step="train", seed=0, parts=parts)

    def load(self, model: nn.Module, ask: Ask) -> None:
        depth, layers = ask.setting("depth", int), len(self._stages)
        if not 1 <= depth <= layers:
            raise WireError(f"step {ask.step!r}: the plan's depth is {depth}, the model has layers 1 to {layers}")
        self._depth = depth
        super().load(model, ask)

    def own_tensors(self) -> frozenset[str]:
        return names_above(self.local.model, self._depth)


class FedRepPlusDevice(FedPerPlusDevice):
    """Device half of FedRep+: trains the layers above l_k, then those below; all of them at once while l_k is L."""

    config: FedRepPlusConfig

    def fit(self, ask: Ask) -> None:
        if self._depth == len(self._stages):
            super().fit(ask)
        else:
            train_head_then_base(self, ask, self._stages[: self._depth].modules(), self.config)


class FedPerPlusServer(FedAvgServer):
    """Server half of FedPer+: counts each device's rounds, and averages each layer over the devices that share it.

    Raises:
        ModelError: `[model] device` is not a `SplitModel`.
    """

    summary = "FedPer whose cut falls as a device takes part"
    config: FedPerPlusConfig

    def __init__(self, config: FedPerPlusConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self._layers = layer_names(self.model)
        self._paths = list(self.sizes().model.tensors)
        self._l_min = shallowest_layer(layered(self.model), l_min=config.l_min, dropping_set=config.dropping_set)
        self.participations: dict[str, int] = {}

    def depth(self, device: str) -> int:
        """Returns l_k = max(l_min, L - floor((Z_k - 1) / Z_0)) of the device's next round, its Z_k-th."""
        participation = self.participations.get(device, 0) + 1
        return distillation_layer(participation, len(self._layers), self.config.drop_every, self._l_min)

    def message_for(self, device: str) -> Parts:
        """Returns l_k and the layers up to it."""
        depth = self.depth(device)
        shared = model_parameters(self.model, without=names_above(self.model, depth))
        return {"plan": Plan(values={"depth": depth}), "parameters": shared}

    async def round(self, cohort: Cohort) -> None:
        asked = cohort.sample(self.config.participation_ratio)
        answers = cohort.ask("train", self.message_for, to=asked, columns=self.tensors_of)
        self.update(cohort, [answer async for answer in answers])

    def tensors_of(self, device: str) -> list[str]:
        """Returns the paths of the tensors that a device's answer has, which are those that it is sent."""
        above = names_above(self.model, self.depth(device))
        return [path for path in self._paths if path.partition("/")[2] not in above]

    def update(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> None:
        """Takes each layer's mean over the answers that have it; a layer that none has stays as it is."""
        sent = {answer.device: answer.part("parameters", ModelParameters) for answer in received}
        for layer, names in self._layers.items():
            sharing = [one for one in received if names <= {*sent[one.device].parameters, *sent[one.device].buffers}]
            if names and sharing:
                cohort.report("sharing_devices", {layer: len(sharing)})
                others = self.model.state_dict().keys() - names
                load_parameters(self.model, self.mean(cohort, sharing, "parameters", names), without=others)
        for answer in received:
            self.participations[answer.device] = self.participations.get(answer.device, 0) + 1

    async def finish(self, cohort: Cohort) -> None:
        await cohort.deliver(self.message_for)

    def forget(self, device: str, notes: Notes) -> None:
        self.participations.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "participations": dict(self.participations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.participations = dict(state["participations"])

    def global_model(self) -> None:
        return None

    def export(self) -> None:
        return None


class FedRepPlusServer(FedPerPlusServer):
    """Server half of FedRep+: FedPer+'s."""

    summary = "FedRep whose cut falls as a device takes part"


def layered(model: nn.Module) -> SplitModel:
    """Returns a model whose stages are its layers. Raises ModelError for a model without stages."""
    if isinstance(model, SplitModel):
        return model
    raise ModelError(
        f"FedPer+ and FedRep+ need a SplitModel, which can be cut after every layer, got {type(model).__name__}; "
        "build one from a list of stages, or with split_sequential"
    )


def layer_names(model: nn.Module) -> dict[str, frozenset[str]]:
    """Returns the state-dict names of each layer's tensors by the layer's name, first to last."""
    split = layered(model)
    stages = zip(split.stage_names, split.stages, strict=True)
    return {stage: frozenset(f"stages.{stage}.{name}" for name in part.state_dict()) for stage, part in stages}


def names_above(model: nn.Module, depth: int) -> frozenset[str]:
    """Returns the state-dict names of the tensors of layers `depth` + 1 to L."""
    return frozenset().union(*list(layer_names(model).values())[depth:])


register("fedper_plus", FedPerPlusConfig, FedPerPlusDevice, FedPerPlusServer)
register("fedrep_plus", FedRepPlusConfig, FedRepPlusDevice, FedRepPlusServer)
