"""FedDKD, server half: averages the devices' models, then improves the mean by J distillation steps.

Li, Chen and Lu, FedDKD: Federated Learning with Decentralized Knowledge Distillation, 2022, Algorithms 1, 2 and, for
FedDKD_BN, 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError, QuorumNotReached
from fleetdistill.knowledge import Array, DistillationGradient, ModelParameters, Parts, Plan
from fleetdistill.methods.feddkd import FedDKDConfig
from fleetdistill.model import embedding_tap
from fleetdistill.tensors import batch_norm_names, load_parameters, model_parameters, part_shapes
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.averaging import WeightedMean
from fleetdistill_server.cohort import Cohort
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.setting import Setting


@dataclass
class Gradients:
    """What the devices answered to one distillation step: the mean gradient, and each device's loss in nats."""

    mean: WeightedMean = field(default_factory=WeightedMean)
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, device: str, sent: DistillationGradient, weight: float) -> bool:
        """Adds a device's answer; False for a loss that is not finite, whose gradient means nothing and is left out."""
        self.losses[device] = sent.loss
        if not math.isfinite(sent.loss):
            return False
        self.mean.add(ModelParameters(parameters=sent.gradients), weight)
        return True

    @property
    def usable(self) -> bool:
        """Whether there is any gradient."""
        return any(math.isfinite(loss) for loss in self.losses.values())

    def rise_since(self, before: Gradients) -> float:
        """The devices' mean loss over what it was for the same devices one step before; 0 where there was no step."""
        earlier = sum(before.losses.get(device, 0.0) for device in self.losses)
        return sum(self.losses.values()) / earlier if earlier > 0 else 0.0


class FedDKDServer(ServerMethod):
    """Keeps the global model."""

    config: FedDKDConfig
    same_architecture = True
    steps = {  # noqa: RUF012  (a ClassVar of the base)
        "train": {"parameters": "model_parameters"},
        "distil": {"gradient": "distillation_gradient"},
    }

    def __init__(self, config: FedDKDConfig, setting: Setting) -> None:
        model = setting.device_model().to(setting.torch_device)
        norms = batch_norm_names(model)
        _check_variant(config, model, bool(norms))
        super().__init__(config.for_batch_norm(bool(norms)), setting)
        self.model = model
        self._stays_on_devices = norms if config.variant == "bn" else frozenset[str]()

    def requirements(self) -> contract_pb2.Requirements:
        columns = ["parameters", "gradients"] if self.config.dkd_steps else ["parameters"]
        return contract_pb2.Requirements(same_architecture=True, columns=columns)

    def initial(self) -> ModelParameters:
        """The whole model, with FedDKD_BN also the batch-norm that devices keep to themselves from then on."""
        return model_parameters(self.model)

    def uploads(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        shared = self._shared()
        gradient = DistillationGradient(gradients=shared.parameters, batch_size=1, loss=0.0)
        return {"parameters": part_shapes(shared), "gradient": part_shapes(gradient)}

    async def round(self, cohort: Cohort) -> None:
        number = cohort.completed + 1
        mean, devices = WeightedMean(), list[str]()
        async for answer in cohort.ask("train", self._task(number), to=cohort.sample(self.config.fraction)):
            mean.add(answer.part("parameters", ModelParameters), weight=answer.samples)  # Alg. 1, line 6
            devices.append(answer.device)
        load_parameters(self.model, mean.result(), without=self._stays_on_devices)
        await self._distil(cohort, number, devices)

    async def _distil(self, cohort: Cohort, number: int, devices: list[str]) -> None:
        """Alg. 1, lines 7 to 11, each step with the devices that answered all steps before it."""
        taken, last = 0, Gradients()
        before_step = _copy(self.model)
        for step in range(1, self.config.steps_in(number) + 1):
            try:
                gradients = await self._gradients(cohort, step, devices)
            except QuorumNotReached as reason:
                cohort.event("distillation-stopped", f"{reason}; the round ends after {taken} distillation steps")
                break
            if self._diverges(cohort, step, gradients.rise_since(last)):
                self.model.load_state_dict(before_step)
                taken -= 1
                break
            if not gradients.usable:
                break
            before_step = _copy(self.model)
            shortened = limited(gradients.mean.result().parameters, self.config.dkd_max_norm)
            descend(self.model, shortened, self.config.dkd_rate(number, step))  # line 10
            taken, last, devices = taken + 1, gradients, list(gradients.losses)
            cohort.report("distillation_loss", {str(step): sum(last.losses.values()) / len(last.losses)})
        cohort.report("distillation_steps", taken)

    async def _gradients(self, cohort: Cohort, step: int, devices: list[str]) -> Gradients:
        """Messages 3 and 4: the model to every teacher, a gradient from each."""
        gradients = Gradients()
        payload: Parts = {"plan": Plan(values={"dkd_step": step}), "parameters": self._shared()}
        async for answer in cohort.ask("distil", payload, to=devices):
            weight = answer.samples if self.config.dkd_weighting == "samples" else 1
            if not gradients.add(answer.device, answer.part("gradient", DistillationGradient), weight):
                text = f"distillation step {step}: the loss is not finite; the gradient is left out"
                cohort.event("gradient-left-out", text, answer.device)
        return gradients

    def _diverges(self, cohort: Cohort, step: int, rise: float) -> bool:
        """The guard: the step before made the devices' loss worse, so it is undone and no more are taken."""
        if not (self.config.divergence_guard and rise > self.config.divergence_factor):
            return False
        text = f"after distillation step {step - 1} the loss was {rise:.2f} times as large; the step is undone"
        cohort.event("divergence-guard", f"{text}: distillation rate too large, lower dkd_lr or set dkd_max_norm")
        return True

    def _task(self, number: int) -> Parts:
        plan = Plan(values={"learning_rate": self.config.local_rate(number)})
        return {"plan": plan, "parameters": self._shared()}

    def _shared(self) -> ModelParameters:
        """What travels of the model: everything, or with FedDKD_BN all but batch-norm."""
        return model_parameters(self.model, without=self._stays_on_devices)

    async def finish(self, cohort: Cohort) -> None:
        await cohort.tell({"parameters": self._shared()})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])

    def global_model(self) -> nn.Module | None:
        """None with FedDKD_BN, whose models are complete on the devices only."""
        return None if self._stays_on_devices else self.model

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        """As `global_model`."""
        return None if self._stays_on_devices else (self.model, self.setting.input_shape)


def descend(model: nn.Module, gradients: Mapping[str, Array], rate: float) -> None:
    """w <- w - gamma * gradient, for the parameters that have one; plain gradient descent, nothing is remembered.

    Args:
        model: Changes in place.
        gradients: Arrays by parameter name, in the parameters' shapes.
        rate: gamma of this step.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, gradient in gradients.items():
            own = parameters[name]
            own.sub_(rate * torch.from_numpy(gradient).to(own.device, own.dtype))


def limited(gradients: Mapping[str, Array], max_norm: float | None) -> Mapping[str, Array]:
    """Gradients scaled down, all by one factor, to an Euclidean norm of at most `max_norm`; None for no limit."""
    if max_norm is None:
        return gradients
    norm = math.sqrt(sum(float((one.astype("f8") ** 2).sum()) for one in gradients.values()))
    return gradients if norm <= max_norm else {name: one * (max_norm / norm) for name, one in gradients.items()}


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _check_variant(config: FedDKDConfig, model: nn.Module, has_batch_norm: bool) -> None:
    name = type(model).__name__
    if config.variant == "max" and embedding_tap(model) is None:
        raise ConfigurationError(f"variant 'max' needs a penultimate activation, and {name} has no embedding(x)")
    if config.variant == "bn" and not has_batch_norm:
        raise ConfigurationError(f"variant 'bn' needs at least one batch-norm layer, and {name} has none")
