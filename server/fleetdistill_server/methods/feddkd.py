"""Server half of FedDKD: averages the devices' models, then improves the mean by J distillation steps.

Li, Chen and Lu, FedDKD: Federated Learning with Decentralized Knowledge Distillation, 2022, Algorithms 1, 2 and, for
FedDKD_BN, 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fleetdistill.errors import ConfigurationError, QuorumNotReached
from fleetdistill.knowledge import Array, DistillationGradient, ModelParameters, Parts, Plan, Weights
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.training.model import embedding_tap
from fleetdistill.training.parameters import batch_norm_names, load_parameters, model_parameters
from fleetdistill.training.rollback import snapshot, train_or_roll_back
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.averaging import OFF, WeightedMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes

_TOO_LARGE = "the distillation rate is too large; lower dkd_lr or set dkd_max_norm"


@dataclass
class Gradients:
    """The devices' answers to one distillation step: the mean gradient, and each device's loss in nats."""

    mean: WeightedMean
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, device: str, sent: DistillationGradient, weight: float) -> bool:
        """Adds a device's answer; returns False, and leaves the gradient out, if its loss is not finite."""
        usable = math.isfinite(sent.loss)
        self.losses[device] = sent.loss if usable else math.inf
        if not usable:
            return False
        self.mean.add(device, ModelParameters(parameters=sent.gradients), weight)
        return True

    @property
    def finite(self) -> dict[str, float]:
        """The finite losses of devices whose gradients are in the mean."""
        left_out = self.mean.left_out
        return {device: loss for device, loss in self.losses.items() if math.isfinite(loss) and device not in left_out}

    def rise_since(self, before: Gradients) -> float:
        """Returns the ratio of the mean loss to the previous step's, over devices with a finite loss in that step.

        The ratio is infinite if one of these losses is no longer finite, or if all were 0 and one is above 0 now. It is
        0 if no device has both losses.
        """
        both = before.finite.keys() & self.losses.keys()
        earlier, now = (sum(item.losses[device] for device in both) for item in (before, self))
        if earlier > 0:
            return now / earlier
        return math.inf if now > 0 else 0.0


class Progress:
    """State of a round's distillation.

    Attributes:
        taken: Number of steps taken.
        last: Gradients of the last step.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.last = Gradients(WeightedMean(OFF))
        self._restore: Callable[[], None] = lambda: None

    def step_taken(self, gradients: Gradients, restore: Callable[[], None]) -> None:
        """Records one more step, and the function that restores the model from before it."""
        self.taken, self.last, self._restore = self.taken + 1, gradients, restore

    def roll_back(self) -> None:
        """Restores the model from before the last step."""
        self._restore()
        self.taken -= 1


class _StopDistilling(Exception):
    """Raised to end the round's distillation."""


class FedDKDServer(ServerMethod):
    """Stores the global model, averages it and distils into it."""

    config: FedDKDConfig
    summary = "averages models, then J steps along devices' gradients"
    figures = {"distillation_steps": Figure("Distillation steps")}  # noqa: RUF012  (a ClassVar of the base)

    def __init__(self, config: FedDKDConfig, context: MethodContext) -> None:
        model = context.device_model().to(context.torch_device)
        norms = batch_norm_names(model)
        _check_variant(config, model, bool(norms))
        super().__init__(config.for_batch_norm(bool(norms)), context)
        self.model = model
        self._stays_on_devices = norms if config.variant == "bn" else frozenset[str]()

    @classmethod
    def needs(cls, config: FedDKDConfig) -> Needs:
        return Needs(same_architecture=True)

    @classmethod
    def exchanges(cls, config: FedDKDConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of feddkd.md in docs/reference/methods; models include buffers, gradients do not."""
        model = {"parameters": ModelParameters.schema(sizes.model)}
        gradient = {"gradient": DistillationGradient.schema(sizes.model)}
        return [
            Exchange(step="train", down=model, up=model),
            Exchange(step="distil", down=model, up=gradient, times=config.dkd_steps, setting="dkd_steps"),
        ]

    def sizes(self) -> Sizes:
        return Sizes(classes=self.context.classes, model=Weights.of(self.shared_parameters()))

    def initial(self) -> ModelParameters:
        """Returns the whole model, for FedDKD_BN with the batch-norm layers, which later stay on the devices."""
        return model_parameters(self.model)

    async def round(self, cohort: Cohort) -> None:
        number = cohort.completed + 1
        mean, devices = WeightedMean(self.config.robust), list[str]()
        asked = cohort.sample(self.config.participation_ratio)
        async for answer in cohort.ask("train", self._train_message(number), to=asked):
            mean.add(answer.device, answer.part("parameters", ModelParameters), answer.samples)
            devices.append(answer.device)
        load_parameters(self.model, mean.result(cohort), without=self._stays_on_devices)  # Alg. 1, line 6
        progress = Progress()
        with suppress(_StopDistilling):
            for step in range(1, self.config.steps_in(number) + 1):  # lines 7 to 11
                gradients = await self._gradients(cohort, step, devices)
                self._stop_if_worse(cohort, gradients, progress)  # guard
                self._stop_if_too_few(cohort, step, gradients, len(devices))  # guard
                self._descend(cohort, step, gradients, progress)  # line 10
        cohort.report("distillation_steps", progress.taken)

    async def _gradients(self, cohort: Cohort, step: int, devices: list[str]) -> Gradients:
        """Sends message 3, the model, to each device that has a teacher and collects messages 4, the gradients."""
        gradients = Gradients(WeightedMean(self.config.robust))
        payload: Parts = {"plan": Plan(values={"dkd_step": step}), "parameters": self.shared_parameters()}
        try:
            async for answer in cohort.ask("distil", payload, to=devices):
                weight = answer.samples if self.config.dkd_weighting == "samples" else 1
                if not gradients.add(answer.device, answer.part("gradient", DistillationGradient), weight):
                    text = f"distillation step {step}: the loss is not finite; the gradient is left out"
                    cohort.event("gradient-left-out", text, answer.device)
        except QuorumNotReached as reason:
            cohort.event("distillation-stopped", f"{reason}; the round ends after {step - 1} distillation steps")
            raise _StopDistilling from reason
        return gradients

    def _stop_if_worse(self, cohort: Cohort, now: Gradients, progress: Progress) -> None:
        """Guard: rolls the last step back if the loss rose; also with the guard off if no loss is finite."""
        if not progress.taken:
            return
        rise, after = now.rise_since(progress.last), f"after distillation step {progress.taken}"
        risen = self.config.divergence_guard and rise > self.config.divergence_factor
        if risen:
            text = f"{after} the loss is {rise:.2f} times the previous one and the step is rolled back: {_TOO_LARGE}"
            cohort.guard("divergence", text)
        elif not now.finite:
            text = f"{after} no device's loss is finite and the step is rolled back: {_TOO_LARGE}"
            cohort.event("distillation-undone", text)
        if risen or not now.finite:
            progress.roll_back()
            raise _StopDistilling

    def _stop_if_too_few(self, cohort: Cohort, step: int, gradients: Gradients, asked: int) -> None:
        """Guard: ends the distillation if fewer devices than the quorum have a finite gradient."""
        finite, needed = len(gradients.finite), max(1, cohort.needed(asked))
        if finite < needed:
            text = (
                f"distillation step {step}: {finite} of {asked} devices have a finite gradient, {needed} are required"
            )
            cohort.event("distillation-stopped", f"{text}; the round ends after {step - 1} distillation steps")
            raise _StopDistilling

    def _descend(self, cohort: Cohort, step: int, gradients: Gradients, progress: Progress) -> None:
        """Takes one step w <- w - gamma_j * mean gradient; rolls it back if a weight is not finite."""
        restore, rate = snapshot(self.model), self.config.dkd_rate(cohort.completed + 1, step)
        failure = train_or_roll_back(
            lambda: descend(self.model, self._limited_mean(gradients, cohort), rate),
            self.model,
            rate=("this step's dkd_lr", rate),
        )
        if failure:
            text = f"distillation step {step} is rolled back: {failure}"
            cohort.event("distillation-undone", f"{text}; lower it or set dkd_max_norm")
            raise _StopDistilling
        progress.step_taken(gradients, restore)
        finite = gradients.finite
        cohort.report("distillation_loss", {str(step): sum(finite.values()) / len(finite)})

    def _limited_mean(self, gradients: Gradients, notes: Notes) -> Mapping[str, Array]:
        return limit(gradients.mean.result(notes).parameters, self.config.dkd_max_norm)

    def _train_message(self, number: int) -> Parts:
        plan = Plan(values={"learning_rate": self.config.local_rate(number)})
        return {"plan": plan, "parameters": self.shared_parameters()}

    def shared_parameters(self) -> ModelParameters:
        """Returns the parameters that are sent: all of them, or with FedDKD_BN all but batch-norm."""
        return model_parameters(self.model, without=self._stays_on_devices)

    async def finish(self, cohort: Cohort) -> None:
        await cohort.deliver({"parameters": self.shared_parameters()})

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])

    @property
    def has_global_model(self) -> bool:
        """False with FedDKD_BN, where only devices have complete models."""
        return not self._stays_on_devices

    def global_model(self) -> nn.Module | None:
        """Returns the global model; None with FedDKD_BN."""
        return None if self._stays_on_devices else self.model

    def export(self) -> tuple[nn.Module, tuple[int, ...]] | None:
        """Returns the global model and the shape of one input; None with FedDKD_BN."""
        return None if self._stays_on_devices else (self.model, self.context.input_shape)


def descend(model: nn.Module, gradients: Mapping[str, Array], rate: float) -> None:
    """Takes one step of plain gradient descent, w <- w - gamma * gradient, for the parameters with a gradient.

    Args:
        model: Model to change in place.
        gradients: Gradients by parameter name, in the parameters' shapes.
        rate: Step size gamma, above 0.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, gradient in gradients.items():
            own = parameters[name]
            own.sub_(rate * torch.from_numpy(gradient).to(own.device, own.dtype))


def limit(gradients: Mapping[str, Array], max_norm: float | None) -> Mapping[str, Array]:
    """Scales all gradients by one factor to a Euclidean norm of at most `max_norm`; None for no limit."""
    if max_norm is None:
        return gradients
    norm = math.sqrt(sum(float((gradient.astype("f8") ** 2).sum()) for gradient in gradients.values()))
    return gradients if norm <= max_norm else {name: one * (max_norm / norm) for name, one in gradients.items()}


def _check_variant(config: FedDKDConfig, model: nn.Module, has_batch_norm: bool) -> None:
    name = type(model).__name__
    if config.variant == "max" and embedding_tap(model) is None:
        raise ConfigurationError(
            f"variant 'max' needs a model with embedding(x), and {name} has none; choose another variant or model"
        )
    if config.dkd_student_mode == "train" and has_batch_norm and config.dkd_batch_size < 2:
        raise ConfigurationError(
            "dkd_student_mode 'train' needs dkd_batch_size >= 2 for a model with batch-norm; raise dkd_batch_size"
        )
    if config.variant == "bn" and not has_batch_norm:
        raise ConfigurationError(f"variant 'bn' needs a model with at least one batch-norm layer, and {name} has none")
