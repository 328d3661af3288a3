"""DaFKD, server half: the mean of the devices' classifiers learns from their ensemble, on generated samples.

Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, Algorithm 1. In the ensemble each device
counts, sample by sample, as much as its discriminator recognises the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import (
    Discriminator,
    Generator,
    Kind,
    ModelParameters,
    Parts,
    Plan,
    WeightedPredictions,
    Weights,
)
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.samples import distillation_samples, make_generator
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.models.discriminators import JudgedClassifier, shared_features
from fleetdistill.training.local_training import extract, train_steps
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.model import fingerprint, frozen_batch_norm
from fleetdistill.training.parameters import load_parameters, model_parameters, part_shapes
from fleetdistill.training.rollback import reason_undone
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.dafkd.ensemble import (
    classes_needed,
    effective_devices,
    ensemble,
    ensemble_of_weighted,
    equal_weights,
    importance_weights,
)
from fleetdistill_server.methods.traffic import Content, Exchange, Sizes

_PROBES = 64
Teacher = tuple[Tensor, Tensor]
"""The samples that can be distilled on `[M, ...]`, and the ensemble's probabilities for them `[M, classes]`."""


class DaFKDServer(ServerMethod):
    """Keeps the global classifier w and the global generator theta^g; discriminators are the devices' own."""

    config: DaFKDConfig
    summary = "averages models, then distils their ensemble on generated samples"
    same_architecture = True
    steps = {  # noqa: RUF012  (a ClassVar of the base)
        "train": {"parameters": "model_parameters", "generator": "generator", "discriminator": "discriminator"},
        "predict": {"predictions": "weighted_predictions"},
    }

    def __init__(self, config: DaFKDConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.steps = _steps(config)  # type: ignore[misc]  # what an answer holds is a setting
        self.same_architecture = config.upload_model or config.feature_level  # type: ignore[misc]
        self.model = context.device_model().to(context.torch_device)
        features = self._feature_shape()
        if config.feature_level:
            _check_range_of_features(self.model, context.input_shape)
        sample_shape = features if config.feature_level else context.input_shape
        self.generator = context.generator(lambda: make_generator(config, sample_shape, context.classes))
        self.generator.to(context.torch_device)
        sharing, feature_level = config.sharing, config.feature_level
        self._student = JudgedClassifier(self.model, features, sharing=sharing, feature_level=feature_level)
        self._member = JudgedClassifier(context.device_model(), features, sharing=sharing, feature_level=feature_level)
        self._member.to(context.torch_device)

    def _feature_shape(self) -> tuple[int, ...]:
        zeros = torch.zeros(1, *self.context.input_shape)
        return tuple(extract(lambda x: shared_features(self.model, x), zeros, model=self.model).shape[1:])

    @classmethod
    def columns(cls, config: DaFKDConfig) -> Sequence[str]:
        return ["parameters"] if config.discriminator_location == "server" else ["parameters", "logits"]

    @classmethod
    def steps_for(cls, config: DaFKDConfig) -> Mapping[str, Mapping[str, str]]:
        return _steps(config)

    @classmethod
    def exchanges(cls, config: DaFKDConfig, sizes: Sizes) -> Sequence[Exchange]:
        """dafkd.md, section 8; soft only for a device whose model is the server's, any other is sent no w."""
        predictions = config.kd_samples * sizes.classes if config.lagged else 0
        down = Content(weights=[sizes.model, sizes.generator])
        up = Content(float32=predictions + _head_numbers(config, sizes), weights=_uploaded(config, sizes))
        train = Exchange(step="train", down=down, up=up)
        if not config.exact:
            return [train]
        second = Content(float32=config.kd_samples * sizes.classes)
        return [train, Exchange(step="predict", down=Content(weights=[sizes.generator]), up=second)]

    def initial(self) -> ModelParameters | None:
        """One classifier for all devices; none where devices may run their own."""
        return model_parameters(self.model) if self.same_architecture else None

    def uploads(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        sharing = self.config.sharing
        discriminator = Discriminator(parameters=model_parameters(self._member.discriminator), shares_extractor=sharing)
        return {
            "parameters": part_shapes(model_parameters(self.model)),
            "generator": part_shapes(self._generator_part()),
            "discriminator": part_shapes(discriminator),
            "predictions": {"values": (self.config.kd_samples, self.context.classes)},
        }

    async def round(self, cohort: Cohort) -> None:
        config, noise_seed = self.config, cohort.generator("noise").initial_seed()
        lagged = self._samples(noise_seed) if config.lagged else None  # of theta^g_t, which devices have too
        models, generators, answers = WeightedMean(config.robust), WeightedMean(config.robust), list[DeviceAnswer]()
        asked = cohort.sample(config.participation_ratio)
        async for answer in cohort.ask("train", lambda device: self._message(device, cohort, noise_seed), to=asked):
            weight = answer.samples if config.aggregation == "samples" else 1
            generators.add(answer.device, answer.part("generator", Generator).parameters, weight)  # eq. (4)
            if config.upload_model:
                models.add(answer.device, answer.part("parameters", ModelParameters), weight)  # eq. (6)
            answers.append(answer)
        load_parameters(self.generator, generators.result(cohort))
        if config.upload_model:
            load_parameters(self.model, models.result(cohort))
        far_off = {*generators.left_out, *models.left_out}
        answers = [answer for answer in answers if answer.device not in far_off]  # nor do these teach
        if config.exact:
            answers = [a async for a in cohort.ask("predict", self._second_message(noise_seed), to=_names(answers))]
        if cohort.completed + 1 < config.kd_start_round:
            return
        samples = self._samples(noise_seed) if lagged is None else lagged  # of theta^g_{t+1}, as in Algorithm 1
        if config.discriminator_location == "server":
            teacher = self._judged_ensemble(answers, samples, cohort)  # eq. (7)
        else:
            teacher = self._weighted_ensemble(answers, samples, noise_seed, cohort)
        if teacher is not None and self._mature(teacher, cohort):
            distil = partial(self._distil, *teacher, cohort.generator("distil"))  # eq. (8)
            failure = reason_undone(distil, self.model, rate=("kd_lr", config.kd_lr))
            if failure:
                cohort.event("distillation-undone", f"the mean of the devices' models stays as it is: {failure}")

    async def finish(self, cohort: Cohort) -> None:
        fitting = [device for device in cohort.remaining if self._runs_our_model(device, cohort)]
        async for _ in cohort.ask("deliver", {"parameters": model_parameters(self.model)}, to=fitting, quorum=0.0):
            pass

    # --- messages

    def _message(self, device: str, cohort: Cohort, noise_seed: int) -> Parts:
        """Message 1: w_t where it fits the device's classifier, theta^g_t, and the round's plan."""
        stop = self.config.gan_stop_round
        adversarial = stop is None or cohort.completed < stop
        plan: dict[str, Any] = {"adversarial": adversarial}
        if self.config.lagged:
            plan["noise_seed"] = noise_seed
        parts: dict[str, Kind] = {"plan": Plan(values=plan), "generator": self._generator_part()}
        if self._runs_our_model(device, cohort):
            parts["parameters"] = model_parameters(self.model)
        return parts

    def _second_message(self, noise_seed: int) -> Parts:
        """Message 2b of `exact`: theta^g_{t+1} and the seed."""
        return {"plan": Plan(values={"noise_seed": noise_seed}), "generator": self._generator_part()}

    def _generator_part(self) -> Generator:
        return Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)

    def _runs_our_model(self, device: str, cohort: Cohort) -> bool:
        return self.same_architecture or cohort.model_fingerprint(device) == fingerprint(self.model)

    # --- the ensemble

    def _samples(self, noise_seed: int) -> Tensor:
        return distillation_samples(self.generator, noise_seed, self.config.kd_samples, self.context.torch_device)

    def _judged_ensemble(self, answers: list[DeviceAnswer], samples: Tensor, cohort: Cohort) -> Teacher | None:
        """Eqs. (7) and (8) with the devices' models and discriminators, which are heard one after the other."""
        verdicts, logits = list[Tensor](), list[Tensor]()
        for answer in answers:
            load_parameters(self._member.classifier, answer.part("parameters", ModelParameters))
            load_parameters(self._member.discriminator, answer.part("discriminator", Discriminator).parameters)
            verdict_m, logits_mc = extract(self._member.judge, samples), extract(self._member.answer, samples)
            if bool(verdict_m.isfinite().all() and logits_mc.isfinite().all()):
                verdicts.append(verdict_m)
                logits.append(logits_mc)
                cohort.report("likelihood", {answer.device: float(verdict_m.sigmoid().mean())})
            else:
                text = f"the model of {answer.device} is not finite on generated samples and does not teach"
                cohort.event("member-left-out", text, answer.device)
        if not logits:
            return None
        weights_km = importance_weights(torch.stack(verdicts))
        if not self.config.correlation:
            weights_km = equal_weights(*weights_km.shape)
        cohort.report("effective_devices", effective_devices(weights_km))
        return samples, ensemble(weights_km, torch.stack(logits), self.config.temperature, self.config.ensemble_space)

    def _weighted_ensemble(
        self, answers: list[DeviceAnswer], samples: Tensor, noise_seed: int, cohort: Cohort
    ) -> Teacher | None:
        """Eqs. (7) and (8) with predictions that the devices have weighted themselves."""
        total_mc = torch.zeros(len(samples), self.context.classes, dtype=torch.float64)
        importance = list[Tensor]()
        for answer in answers:
            sent = answer.part("predictions", WeightedPredictions)
            if sent.noise_seed != noise_seed:
                text = f"{answer.device} predicts on samples of seed {sent.noise_seed}, the round's is {noise_seed}"
                cohort.event("member-left-out", f"{text}; it does not teach", answer.device)
                continue
            weighted_mc = torch.tensor(sent.values, dtype=torch.float64)
            total_mc += weighted_mc
            importance.append(weighted_mc.sum(dim=1))  # f_k: the rows of s_k sum to 1
            cohort.report("likelihood", {answer.device: float(importance[-1].mean())})
        if not importance:
            return None
        teacher_mc, usable_m = ensemble_of_weighted(total_mc)
        importance_km = torch.stack(importance)[:, usable_m]
        if bool(usable_m.any()):  # a mean over no sample is no number
            cohort.report("effective_devices", effective_devices(importance_km / importance_km.sum(dim=0)))
        cohort.report("dropped_samples", int((~usable_m).sum()))
        return samples[usable_m.to(samples.device)], teacher_mc[usable_m]

    def _mature(self, teacher: Teacher, cohort: Cohort) -> bool:
        """The guard: a young generator makes samples of one or two classes, and distilling from them does harm."""
        _, teacher_mc = teacher
        classes = teacher_mc.argmax(dim=1).unique().numel()
        cohort.report("generated_classes", classes)
        needed = classes_needed(teacher_mc)
        if classes >= needed or not self.config.maturity_guard:
            return True
        text = f"the ensemble sees {classes} of {self.context.classes} classes in the generated samples"
        cohort.guard("maturity", f"{text}, {needed} are needed; nothing is distilled from them")
        return False

    # --- distillation

    def _distil(self, samples: Tensor, teacher_mc: Tensor, generator: torch.Generator) -> None:
        """Eq. (8): the student starts from the mean; at feature level only what lies behind the features learns."""
        if not self.config.kd_epochs or len(samples) < 2:
            return
        optimizer = make_local_optimizer(replace(self.config, learning_rate=self.config.kd_lr), self.model.parameters())
        student, teacher_bc = self._student, teacher_mc.float().to(self.context.torch_device)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            with frozen_batch_norm(student, self.config.freeze_batch_norm):
                logits_bc = student.answer(samples[rows_b])
            return [distillation_loss(logits_bc, teacher_bc[rows_b], self.config.temperature)]

        train_steps(
            self.model,
            len(samples),
            epochs=self.config.kd_epochs,
            batch_size=self.config.batch_size,
            optimizer=optimizer,
            losses=losses,
            generator=generator,
            device=self.context.torch_device,
        )

    # --- state

    def networks(self) -> Mapping[str, torch.nn.Module]:
        return {"model": self.model, "generator": self.generator}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "generator": self.generator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.generator.load_state_dict(state["generator"])

    def global_model(self) -> torch.nn.Module:
        return self.model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]]:
        return self.model, self.context.input_shape


def _check_range_of_features(model: torch.nn.Module, input_shape: tuple[int, ...]) -> None:
    """The feature generator ends in a ReLU: where features may be negative it could make no likeness of them."""
    probe = torch.rand(_PROBES, *input_shape, generator=torch.Generator().manual_seed(0))
    lowest = float(extract(lambda x: shared_features(model, x), probe, model=model).min())
    if lowest < 0:
        raise ConfigurationError(
            f"generator_level = 'feature': features of {type(model).__name__} reach {lowest:.3g} and the generator "
            "makes none below 0; end the layers before the cut with a ReLU, or use generator_level = 'input'"
        )


def _steps(config: DaFKDConfig) -> dict[str, Mapping[str, str]]:
    """What answers consist of: message 2 of the specification's tables, and 2b."""
    train = {"generator": "generator"}
    if config.upload_model:
        train["parameters"] = "model_parameters"
    if config.discriminator_location == "server":
        train["discriminator"] = "discriminator"
    if config.lagged:
        train["predictions"] = "weighted_predictions"
    steps: dict[str, Mapping[str, str]] = {"train": train}
    if config.exact:
        steps["predict"] = {"predictions": "weighted_predictions"}
    return steps


def _head_numbers(config: DaFKDConfig, sizes: Sizes) -> int:
    """F + 1 of the discriminator that shares the classifier's layers, where it is sent."""
    return sizes.embedding + 1 if config.discriminator_location == "server" and config.sharing else 0


def _uploaded(config: DaFKDConfig, sizes: Sizes) -> list[Weights]:
    """Generator, classifier and a discriminator of its own, as far as they are sent."""
    whole = config.discriminator_location == "server" and not config.sharing
    return [sizes.generator, *([sizes.model] * config.upload_model), *([sizes.discriminator or sizes.model] * whole)]


def _names(answers: list[DeviceAnswer]) -> list[str]:
    return [answer.device for answer in answers]
