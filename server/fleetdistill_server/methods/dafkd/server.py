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
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill.wire.schema import PartSchema
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.base import Needs, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.context import MethodContext
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
"""The samples that can be distilled on `[M, ...]`, and the ensemble's probabilities for them `[M, classes]`."""


class DaFKDServer(ServerMethod):
    """Keeps the global classifier w and the global generator theta^g; discriminators are the devices' own."""

    config: DaFKDConfig
    summary = "averages models, then distils their ensemble on generated samples"

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
        """One classifier for all devices, unless they send no more than predictions on generated images."""
        same = config.upload_model or config.feature_level
        return Needs(same_architecture=same, server_has_device_model=True)

    @classmethod
    def exchanges(cls, config: DaFKDConfig, sizes: Sizes) -> Sequence[Exchange]:
        """dafkd.md, section 8; soft only for a device whose model is the server's, any other is sent no w."""
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
        """One classifier for all devices; none where devices may run their own."""
        return model_parameters(self.model) if self.needs(self.config).same_architecture else None

    async def round(self, cohort: Cohort) -> None:
        """Algorithm 1, in one of three variants; each of them averages classifiers only if devices send them."""
        if self.config.lagged:
            await self._lagged_round(cohort)
        elif self.config.exact:
            await self._exact_round(cohort)
        else:
            await self._standard_round(cohort)

    async def _standard_round(self, cohort: Cohort) -> None:
        """The paper's: discriminators are sent, and the server judges with them on samples of theta^g_{t+1}."""
        seed = _noise_seed(cohort)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        if self._distils_after(cohort):
            teacher = self.judged_ensemble(teachers, self.samples(seed), cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    async def _lagged_round(self, cohort: Cohort) -> None:
        """Discriminators stay on the devices, which predict in the same exchange, on samples of theta^g_t."""
        seed = _noise_seed(cohort)
        samples = self.samples(seed)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        if self._distils_after(cohort):
            teacher = self.weighted_ensemble(teachers, samples, seed, cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    async def _exact_round(self, cohort: Cohort) -> None:
        """Discriminators stay on the devices, which predict in a second exchange, on samples of theta^g_{t+1}."""
        seed = _noise_seed(cohort)
        answers = await self._train(cohort, seed)
        teachers = self._average(answers, cohort)  # eqs. (4), (6)
        predictions = await self._predict(teachers, cohort, seed)
        if self._distils_after(cohort):
            teacher = self.weighted_ensemble(predictions, self.samples(seed), seed, cohort)  # eq. (7)
            self._distil(self.if_mature(teacher, cohort), cohort)  # eq. (8)

    # --- steps of the rounds

    async def _train(self, cohort: Cohort, noise_seed: int) -> list[DeviceAnswer]:
        """Messages 1 and 2: eqs. (9) and (3) on the devices."""
        asked = cohort.sample(self.config.participation_ratio)
        message = partial(self.message, cohort=cohort, noise_seed=noise_seed)
        return [answer async for answer in cohort.ask("train", message, to=asked)]

    async def _predict(self, teachers: list[DeviceAnswer], cohort: Cohort, noise_seed: int) -> list[DeviceAnswer]:
        """Messages 2b of `exact`."""
        asked = [answer.device for answer in teachers]
        return [answer async for answer in cohort.ask("predict", self._second_message(noise_seed), to=asked)]

    def _average(self, answers: list[DeviceAnswer], cohort: Cohort) -> list[DeviceAnswer]:
        """Eq. (4) for the generator and eq. (6) for the classifier, where it is sent; returns who may teach.

        A device that is left out of a mean, because it is far off, does not teach either.
        """
        models, generators = WeightedMean(self.config.robust), WeightedMean(self.config.robust)
        for answer in answers:
            weight = answer.samples if self.config.aggregation == "samples" else 1
            generators.add(answer.device, answer.part("generator", Generator).parameters, weight)
            if self.config.upload_model:
                models.add(answer.device, answer.part("parameters", ModelParameters), weight)
        load_parameters(self.generator, generators.result(cohort))
        if self.config.upload_model:
            load_parameters(self.model, models.result(cohort))
        far_off = {*generators.left_out, *models.left_out}
        return [answer for answer in answers if answer.device not in far_off]

    def _distils_after(self, cohort: Cohort) -> bool:
        return cohort.completed + 1 >= self.config.kd_start_round

    def _distil(self, teacher: Teacher | None, cohort: Cohort) -> None:
        """Eq. (8), where there is a teacher; what does not stay finite is undone."""
        if teacher is None:
            return
        train = partial(self.train_student, *teacher, cohort.generator("distil"))
        failure = train_or_roll_back(train, self.model, rate=("kd_lr", self.config.kd_lr))
        if failure:
            cohort.event("distillation-undone", f"the mean of the devices' models stays as it is: {failure}")

    async def finish(self, cohort: Cohort) -> None:
        fitting = [device for device in cohort.remaining if self._runs_global_model(device, cohort)]
        async for _ in cohort.ask("deliver", {"parameters": model_parameters(self.model)}, to=fitting, quorum=0.0):
            pass

    # --- messages

    def message(self, device: str, cohort: Cohort, noise_seed: int) -> Parts:
        """Message 1: w_t where it fits the device's classifier, theta^g_t, and the round's plan."""
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
        """Message 2b of `exact`: theta^g_{t+1} and the seed."""
        return {"plan": Plan(values={"noise_seed": noise_seed}), "generator": self._generator_part()}

    def _generator_part(self) -> Generator:
        return Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)

    def _runs_global_model(self, device: str, cohort: Cohort) -> bool:
        return self.needs(self.config).same_architecture or cohort.model_fingerprint(device) == fingerprint(self.model)

    # --- the ensemble

    def samples(self, noise_seed: int) -> Tensor:
        """The round's samples of the generator as it is, `[M, ...]`: the same on every device, by the seed alone."""
        return distillation_samples(self.generator, noise_seed, self.config.kd_samples, self.context.torch_device)

    def judged_ensemble(self, answers: list[DeviceAnswer], samples: Tensor, notes: Notes) -> Teacher | None:
        """Eqs. (7) and (8) with the devices' models and discriminators; None if no device can teach."""
        judged = [self._judged(answer, samples, notes) for answer in answers]
        members = [one for one in judged if one is not None]
        if not members:
            return None
        realness_km, logits_kmc = (torch.stack(one) for one in zip(*members, strict=True))
        weights_km = importance_weights(realness_km)
        if not self.config.correlation:
            weights_km = equal_weights(*weights_km.shape)
        notes.report("effective_devices", effective_devices(weights_km))
        return samples, ensemble(weights_km, logits_kmc, self.config.temperature, self.config.ensemble_space)

    def _judged(self, answer: DeviceAnswer, samples: Tensor, notes: Notes) -> tuple[Tensor, Tensor] | None:
        """a_k `[M]` and logits `[M, classes]` of one device; None with an event where they are not finite."""
        load_parameters(self.member.classifier, answer.part("parameters", ModelParameters))
        load_parameters(self.member.discriminator, answer.part("discriminator", Discriminator).parameters)
        realness_m, logits_mc = extract(self.member.realness, samples), extract(self.member.classify_generated, samples)
        if not bool(realness_m.isfinite().all() and logits_mc.isfinite().all()):
            text = f"the model of {answer.device} is not finite on generated samples and does not teach"
            notes.event("member-left-out", text, answer.device)
            return None
        notes.report("likelihood", {answer.device: float(realness_m.sigmoid().mean())})
        return realness_m, logits_mc

    def weighted_ensemble(
        self, answers: list[DeviceAnswer], samples: Tensor, noise_seed: int, notes: Notes
    ) -> Teacher | None:
        """Eqs. (7) and (8) with predictions that the devices have weighted themselves; None if no device can teach."""
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
        if bool(usable_m.any()):  # a mean over no sample is no number
            notes.report("effective_devices", effective_devices(importance_km / importance_km.sum(dim=0)))
        notes.report("dropped_samples", int((~usable_m).sum()))
        return samples[usable_m.to(samples.device)], teacher_mc[usable_m]

    def _predictions(self, answer: DeviceAnswer, noise_seed: int, notes: Notes) -> Tensor | None:
        """u_k `[M, classes]` of one device; None with an event where they are about other samples."""
        sent = answer.part("predictions", WeightedPredictions)
        if sent.noise_seed != noise_seed:
            text = f"{answer.device} predicts on samples of seed {sent.noise_seed}, the round's is {noise_seed}"
            notes.event("member-left-out", f"{text}; it does not teach", answer.device)
            return None
        weighted_mc = torch.tensor(sent.values, dtype=torch.float64)
        notes.report("likelihood", {answer.device: float(weighted_mc.sum(dim=1).mean())})
        return weighted_mc

    def if_mature(self, teacher: Teacher | None, notes: Notes) -> Teacher | None:
        """Guard: a young generator makes samples of one or two classes, and distilling from them does harm."""
        if teacher is None:
            return None
        _, teacher_mc = teacher
        classes = teacher_mc.argmax(dim=1).unique().numel()
        notes.report("generated_classes", classes)
        needed = classes_needed(teacher_mc)
        if classes >= needed or not self.config.maturity_guard:
            return teacher
        text = f"the ensemble sees {classes} of {self.context.classes} classes in the generated samples"
        notes.guard("maturity", f"{text}, {needed} are needed; nothing is distilled from them")
        return None

    # --- distillation

    def train_student(self, samples: Tensor, teacher_mc: Tensor, generator: torch.Generator) -> None:
        """Eq. (8): the student starts from the mean; at feature level only what lies behind the features learns."""
        if not self.config.kd_epochs or len(samples) < 2:
            return
        optimizer = make_local_optimizer(replace(self.config, learning_rate=self.config.kd_lr), self.model.parameters())
        student, teacher_bc = self._student, teacher_mc.float().to(self.context.torch_device)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            with frozen_batch_norm(student, self.config.freeze_batch_norm):
                logits_bc = student.classify_generated(samples[rows_b])
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


def _discriminator(config: DaFKDConfig, sizes: Sizes) -> PartSchema:
    """F + 1 numbers of one that shares the classifier's layers, else a network of its own."""
    usual = Weights(sizes.embedding + 1) if config.sharing else sizes.model
    schema = Discriminator.schema(usual if sizes.discriminator is None else sizes.discriminator)
    return schema.when(config.discriminator_location == "server")


def _predictions(config: DaFKDConfig, sizes: Sizes) -> PartSchema:
    return WeightedPredictions.schema(rows=config.kd_samples, classes=sizes.classes)


def _noise_seed(cohort: Cohort) -> int:
    return cohort.generator("noise").initial_seed()
