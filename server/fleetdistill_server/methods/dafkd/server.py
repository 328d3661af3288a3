"""Server half of DaFKD: distils the ensemble of the devices' classifiers into their mean, on generated samples.

Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, Algorithm 1. The ensemble weights each
device, sample by sample, by its discriminator's output.
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
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.model import fingerprint, frozen_batch_norm
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill.wire.kind import PartSchema
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import MethodContext, Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.dafkd.ensemble import (
    classes_needed,
    effective_devices,
    ensemble,
    ensemble_of_weighted,
    equal_weights,
    importance_weights,
)
from fleetdistill_server.methods.traffic import Exchange, Sizes

_PROBES = 64
Teacher = tuple[Tensor, Tensor]
"""Samples for distillation `[M, ...]`, and the ensemble's probabilities for them `[M, classes]`."""


class DaFKDServer(ServerMethod):
    """Stores the global classifier w and the global generator theta^g; each device has its own discriminator."""

    config: DaFKDConfig
    summary = "averages models, then distils them on generated samples"
    figures = {"effective_devices": Figure("Effective devices", digits=2)}  # noqa: RUF012  (a ClassVar of the base)

    def __init__(self, config: DaFKDConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.model = context.device_model().to(context.torch_device)
        features = self._feature_shape()
        if config.feature_level:
            _check_range_of_features(self.model, context.input_shape)
        sample_shape = features if config.feature_level else context.input_shape
        self.generator = context.generator(lambda: make_generator(config, sample_shape, context.classes))
        self.generator.to(context.torch_device)
        sharing, feature_level = config.sharing, config.feature_level
        self._student = JudgedClassifier(self.model, features, sharing=sharing, feature_level=feature_level)
        self.member = JudgedClassifier(context.device_model(), features, sharing=sharing, feature_level=feature_level)
        self.member.to(context.torch_device)

    def _feature_shape(self) -> tuple[int, ...]:
        zeros = torch.zeros(1, *self.context.input_shape)
        return tuple(extract(lambda x: shared_features(self.model, x), zeros, model=self.model).shape[1:])

    @classmethod
    def needs(cls, config: DaFKDConfig) -> Needs:
        """Requires one classifier for all devices, unless devices send only predictions on generated images."""
        same = config.upload_model or config.feature_level
        return Needs(same_architecture=same, server_has_device_model=True)

    @classmethod
    def exchanges(cls, config: DaFKDConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of docs/reference/methods/dafkd.md. Only devices with the server's model receive w."""
        generator = {"generator": Generator.schema(sizes.generator)}
        model, predictions = ModelParameters.schema(sizes.model), _predictions(config, sizes)
        up = {
            **generator,
            "parameters": model.when(config.upload_model),
            "discriminator": _discriminator(config, sizes),
            "predictions": predictions.when(config.lagged),
        }
        train = Exchange(step="train", down={"parameters": model, **generator}, up=up)
        if not config.exact:
            return [train]
        return [train, Exchange(step="predict", down=generator, up={"predictions": predictions})]

    def sizes(self) -> Sizes:
        return Sizes(
            classes=self.context.classes,
            model=Weights.of(model_parameters(self.model)),
            generator=Weights.of(model_parameters(self.generator)),
            discriminator=Weights.of(model_parameters(self.member.discriminator)),
        )

    def initial(self) -> ModelParameters | None:
        """Returns the common initial classifier, or None if devices may run their own."""
        return model_parameters(self.model) if self.needs(self.config).same_architecture else None

    async def round(self, cohort: Cohort) -> None:
        """Runs Algorithm 1 in one of three variants; classifiers are averaged only if devices send them."""
        if self.config.lagged:
            await self._lagged_round(cohort)
        elif self.config.exact:
            await self._exact_round(cohort)
        else:
            await self._standard_round(cohort)

    async def _standard_round(self, cohort: Cohort) -> None:
        """Runs the paper's variant: devices send discriminators; the server uses them on samples of theta^g_{t+1}."""
        seed = _noise_seed(cohort)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        if self._distils_after(cohort):
            teacher = self.judged_ensemble(teachers, self.samples(seed), cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    async def _lagged_round(self, cohort: Cohort) -> None:
        """Runs a round in which discriminators stay on the devices, which send predictions for samples of theta^g_t.

        The predictions are in the same answer as the models.
        """
        seed = _noise_seed(cohort)
        samples = self.samples(seed)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        if self._distils_after(cohort):
            teacher = self.weighted_ensemble(teachers, samples, seed, cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    async def _exact_round(self, cohort: Cohort) -> None:
        """Runs a round in which the discriminators stay on the devices.

        In a second exchange, devices receive theta^g_{t+1} and return predictions for its samples.
        """
        seed = _noise_seed(cohort)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        predictions = await self._predict(teachers, cohort, seed)
        if self._distils_after(cohort):
            teacher = self.weighted_ensemble(predictions, self.samples(seed), seed, cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    # --- steps of the rounds

    async def _train(self, cohort: Cohort, noise_seed: int) -> list[DeviceAnswer]:
        """Sends message 1 and returns the answers, messages 2; devices train by eqs. (9) and (3)."""
        asked = cohort.sample(self.config.participation_ratio)
        message = partial(self.message, cohort=cohort, noise_seed=noise_seed)
        return [answer async for answer in cohort.ask("train", message, to=asked)]

    async def _predict(self, teachers: list[DeviceAnswer], cohort: Cohort, noise_seed: int) -> list[DeviceAnswer]:
        """Sends message 2b of `exact` and returns the devices' predictions."""
        asked = [answer.device for answer in teachers]
        return [answer async for answer in cohort.ask("predict", self._second_message(noise_seed), to=asked)]

    def _average(self, answers: list[DeviceAnswer], cohort: Cohort) -> list[DeviceAnswer]:
        """Averages generators by eq. (4) and, if sent, classifiers by eq. (6); returns the answers for the ensemble.

        An answer that is left out of a mean as an outlier is left out of the ensemble too.
        """
        models, generators = WeightedMean(self.config.robust), WeightedMean(self.config.robust)
        for answer in answers:
            weight = answer.weight if self.config.aggregation == "samples" else answer.decay
            generators.add(answer.device, answer.part("generator", Generator).parameters, weight)
            if self.config.upload_model:
                models.add(answer.device, answer.part("parameters", ModelParameters), weight)
        load_parameters(self.generator, generators.result(cohort))
        if self.config.upload_model:
            load_parameters(self.model, models.result(cohort))
        outliers = {*generators.left_out, *models.left_out}
        return [answer for answer in answers if answer.device not in outliers]

    def _distils_after(self, cohort: Cohort) -> bool:
        return cohort.completed + 1 >= self.config.kd_start_round

    def _distil(self, teacher: Teacher | None, cohort: Cohort) -> None:
        """Trains the student by eq. (8) if there is a teacher; rolls it back if a weight is not finite."""
        if teacher is None:
            return
        train = partial(self.train_student, *teacher, cohort.generator("distil"))
        failure = train_or_roll_back(train, self.model, rate=("kd_lr", self.config.kd_lr))
        if failure:
            cohort.event(
                "distillation-undone", f"the global model is rolled back to the mean of the devices' models: {failure}"
            )

    async def finish(self, cohort: Cohort) -> None:
        fitting = [device for device in cohort.remaining if self._runs_global_model(device, cohort)]
        async for _ in cohort.ask("deliver", {"parameters": model_parameters(self.model)}, to=fitting, quorum=0.0):
            pass

    # --- messages

    def message(self, device: str, cohort: Cohort, noise_seed: int) -> Parts:
        """Returns message 1: theta^g_t, the round's plan, and w_t if the device runs that model."""
        stop = self.config.gan_stop_round
        adversarial = stop is None or cohort.completed < stop
        plan: dict[str, Any] = {"adversarial": adversarial}
        if self.config.lagged:
            plan["noise_seed"] = noise_seed
        parts: dict[str, Kind] = {"plan": Plan(values=plan), "generator": self._generator_part()}
        if self._runs_global_model(device, cohort):
            parts["parameters"] = model_parameters(self.model)
        return parts

    def _second_message(self, noise_seed: int) -> Parts:
        """Returns message 2b of `exact`: theta^g_{t+1} and the samples' seed."""
        return {"plan": Plan(values={"noise_seed": noise_seed}), "generator": self._generator_part()}

    def _generator_part(self) -> Generator:
        return Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)

    def _runs_global_model(self, device: str, cohort: Cohort) -> bool:
        return self.needs(self.config).same_architecture or cohort.model_fingerprint(device) == fingerprint(self.model)

    # --- the ensemble

    def samples(self, noise_seed: int) -> Tensor:
        """Generates the round's samples `[M, ...]` with the current generator; equal on every device for one seed."""
        return distillation_samples(self.generator, noise_seed, self.config.kd_samples, self.context.torch_device)

    def judged_ensemble(self, answers: list[DeviceAnswer], samples: Tensor, notes: Notes) -> Teacher | None:
        """Returns the teacher of eqs. (7), (8) from models and discriminators; None if all are unusable."""
        judged = [self._judged(answer, samples, notes) for answer in answers]
        members = [item for item in judged if item is not None]
        if not members:
            return None
        realness_km, logits_kmc = (torch.stack(item) for item in zip(*members, strict=True))
        weights_km = importance_weights(realness_km)
        if not self.config.correlation:
            weights_km = equal_weights(*weights_km.shape)
        notes.report("effective_devices", effective_devices(weights_km))
        return samples, ensemble(weights_km, logits_kmc, self.config.temperature, self.config.ensemble_space)

    def _judged(self, answer: DeviceAnswer, samples: Tensor, notes: Notes) -> tuple[Tensor, Tensor] | None:
        """Returns one device's a_k `[M]` and logits `[M, classes]`; None, with an event, if they are not finite."""
        load_parameters(self.member.classifier, answer.part("parameters", ModelParameters))
        load_parameters(self.member.discriminator, answer.part("discriminator", Discriminator).parameters)
        apply = self.context.trainer.extract
        realness_m, logits_mc = apply(self.member.realness, samples), apply(self.member.classify_generated, samples)
        if not bool(realness_m.isfinite().all() and logits_mc.isfinite().all()):
            text = f"{answer.device} is left out of the ensemble: its outputs on generated samples are not finite"
            notes.event("member-left-out", text, answer.device)
            return None
        notes.report("likelihood", {answer.device: float(realness_m.sigmoid().mean())})
        return realness_m, logits_mc

    def weighted_ensemble(
        self, answers: list[DeviceAnswer], samples: Tensor, noise_seed: int, notes: Notes
    ) -> Teacher | None:
        """Returns the teacher of eqs. (7), (8) from predictions that devices weighted; None if all are unusable."""
        total_mc = torch.zeros(len(samples), self.context.classes, dtype=torch.float64)
        importance = list[Tensor]()
        for answer in answers:
            weighted_mc = self._predictions(answer, noise_seed, notes)
            if weighted_mc is not None:
                total_mc += weighted_mc
                importance.append(weighted_mc.sum(dim=1))  # f_k: the rows of s_k sum to 1
        if not importance:
            return None
        teacher_mc, usable_m = ensemble_of_weighted(total_mc)
        importance_km = torch.stack(importance)[:, usable_m]
        if bool(usable_m.any()):  # the mean over 0 samples is NaN
            notes.report("effective_devices", effective_devices(importance_km / importance_km.sum(dim=0)))
        notes.report("dropped_samples", int((~usable_m).sum()))
        return samples[usable_m.to(samples.device)], teacher_mc[usable_m]

    def _predictions(self, answer: DeviceAnswer, noise_seed: int, notes: Notes) -> Tensor | None:
        """Returns one device's u_k `[M, classes]`; None, with an event, if they are for other samples."""
        sent = answer.part("predictions", WeightedPredictions)
        if sent.noise_seed != noise_seed:
            text = f"{answer.device} is left out of the ensemble: its predictions are for samples of seed"
            notes.event("member-left-out", f"{text} {sent.noise_seed}, the round's seed is {noise_seed}", answer.device)
            return None
        weighted_mc = torch.tensor(sent.values, dtype=torch.float64)
        notes.report("likelihood", {answer.device: float(weighted_mc.sum(dim=1).mean())})
        return weighted_mc

    def if_mature(self, teacher: Teacher | None, notes: Notes) -> Teacher | None:
        """Guard: returns the teacher, or None if the samples have too few classes for useful distillation."""
        if teacher is None:
            return None
        _, teacher_mc = teacher
        classes = teacher_mc.argmax(dim=1).unique().numel()
        notes.report("generated_classes", classes)
        needed = classes_needed(teacher_mc)
        if classes >= needed or not self.config.maturity_guard:
            return teacher
        text = f"the ensemble predicts {classes} of {self.context.classes} classes for the generated samples"
        notes.guard("maturity", f"{text}, at least {needed} are required; this round has no distillation")
        return None

    # --- distillation

    def train_student(self, samples: Tensor, teacher_mc: Tensor, generator: torch.Generator) -> None:
        """Trains the student by eq. (8), starting from the mean; at feature level only the layers after the cut."""
        if not self.config.kd_epochs or len(samples) < 2:
            return
        optimizer = make_local_optimizer(replace(self.config, learning_rate=self.config.kd_lr), self.model.parameters())
        student, teacher_bc = self._student, teacher_mc.float().to(self.context.torch_device)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            with frozen_batch_norm(student, self.config.freeze_batch_norm):
                logits_bc = student.classify_generated(samples[rows_b])
            return [distillation_loss(logits_bc, teacher_bc[rows_b], self.config.temperature)]

        self.context.trainer.train_steps(
            self.model,
            len(samples),
            epochs=self.config.kd_epochs,
            batch_size=self.config.batch_size,
            optimizer=optimizer,
            losses=losses,
            generator=generator,
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
    """Raises ConfigurationError if features can be negative: the feature generator ends in a ReLU."""
    probe = torch.rand(_PROBES, *input_shape, generator=torch.Generator().manual_seed(0))
    lowest = float(extract(lambda x: shared_features(model, x), probe, model=model).min())
    if lowest < 0:
        raise ConfigurationError(
            f"generator_level is 'feature': features of {type(model).__name__} reach {lowest:.3g}; the generator's "
            "are at least 0. End the layers before the cut with a ReLU, or set generator_level = 'input'"
        )


def _discriminator(config: DaFKDConfig, sizes: Sizes) -> PartSchema:
    """Returns the discriminator's schema: F + 1 numbers if it shares the classifier's layers, else a whole network."""
    usual = Weights(sizes.embedding + 1) if config.sharing else sizes.model
    schema = Discriminator.schema(usual if sizes.discriminator is None else sizes.discriminator)
    return schema.when(config.discriminator_location == "server")


def _predictions(config: DaFKDConfig, sizes: Sizes) -> PartSchema:
    return WeightedPredictions.schema(rows=config.kd_samples, classes=sizes.classes)


def _noise_seed(cohort: Cohort) -> int:
    return cohort.generator("noise").initial_seed()
