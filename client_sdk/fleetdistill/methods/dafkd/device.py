"""Device half of DaFKD.

Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023. A device trains the global classifier and
the global generator on its own data, and a discriminator between its own and generated samples. The server weights the
devices' predictions on generated samples by their discriminators and distils them into the mean of the classifiers.
With `discriminator_location = "device"` a device keeps its discriminator and sends weighted predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetdistill.knowledge import Discriminator, Generator, Kind, ModelParameters, Parts, Plan, WeightedPredictions
from fleetdistill.methods.base import (
    Answer,
    Ask,
    DeviceMethod,
    Local,
    answers,
    with_parameters,
)
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.samples import distillation_samples, make_generator
from fleetdistill.methods.dafkd.training import AdversarialTraining, adam, weighted_predictions
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.models.discriminators import JudgedClassifier, shared_features
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import soft_targets
from fleetdistill.training.parameters import model_parameters, take_weights


class DaFKDDevice(DeviceMethod):
    """Device half of DaFKD: trains classifier, discriminator and generator on the device's own data."""

    config: DaFKDConfig

    def __init__(self, config: DaFKDConfig, local: Local) -> None:
        super().__init__(config, local)
        first = extract(lambda x: shared_features(local.model, x), local.data.first, model=local.model)
        self._feature_shape = tuple(first.shape[1:])
        shape = self._feature_shape if config.feature_level else tuple(local.data.inputs.shape[1:])
        self.generator = make_generator(config, shape, local.classes).to(local.torch_device)
        self.data = local.data.to(local.torch_device)
        self._own: tuple[JudgedClassifier, torch.optim.Optimizer] | None = None

    @classmethod
    def metrics_steps(cls, config: DaFKDConfig) -> Sequence[str]:
        return ("predict",) if config.exact else ("train",)

    def first_ask(self) -> Ask:
        generator = Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)
        plan = Plan(values={"adversarial": True, "noise_seed": 0})
        parts: Parts = {"parameters": model_parameters(self.local.model), "generator": generator, "plan": plan}
        return Ask(round=1, step="train", seed=0, parts=parts)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Runs the device's part of a round (Algorithm 1), in one of three variants."""
        if self.config.lagged:
            parts = self._lagged_round(ask)
        elif self.config.exact:
            parts = self._exact_round(ask)
        else:
            parts = self._sent_round(ask)
        return Answer(parts=parts, samples=len(self.local.data))

    def _sent_round(self, ask: Ask) -> Parts:
        """Runs the paper's variant of a round, which sends the discriminator."""
        self._load_global(ask)  # message 1: w_t and theta^g_t
        self._train(ask)  # eqs. (9) and (3)
        return {**self._weights(), "discriminator": self._discriminator()}  # message 2

    def _lagged_round(self, ask: Ask) -> Parts:
        """Runs a round in which the device keeps its discriminator and sends predictions on samples of theta^g_t."""
        self._load_global(ask)  # message 1: w_t and theta^g_t
        samples = self.samples(ask)  # of theta^g_t
        self._train(ask)  # eqs. (9) and (3)
        return {**self._weights(), "predictions": self._predictions(samples, ask)}  # message 2

    def _exact_round(self, ask: Ask) -> Parts:
        """Runs a round in which step `predict` later sends predictions on samples of theta^g_{t+1}."""
        self._load_global(ask)  # message 1: w_t and theta^g_t
        self._train(ask)  # eqs. (9) and (3)
        return self._weights()  # message 2

    @answers("predict")
    def predict(self, ask: Ask) -> Answer:
        """Answers the second exchange of `exact`: predicts on samples of the round's mean generator."""
        take_weights(self.generator, ask.part("generator", Generator).parameters)  # theta^g_{t+1}
        predictions = self._predictions(self.samples(ask), ask)  # message 2b
        return Answer(parts={"predictions": predictions}, samples=len(self.local.data))

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """Loads the final global classifier into the device's model."""
        take_weights(self.local.model, ask.part("parameters", ModelParameters))
        return Answer(parts={}, samples=len(self.local.data))

    # --- steps of the rounds

    def _load_global(self, ask: Ask) -> None:
        """Loads the global generator, and the global classifier unless the device runs a different one."""
        if "parameters" in ask.parts:
            take_weights(self.local.model, ask.part("parameters", ModelParameters))
        take_weights(self.generator, ask.part("generator", Generator).parameters)

    def _train(self, ask: Ask) -> None:
        judged, discriminator_optimizer = self.ready()
        judged.discriminator.train()
        self.generator.train()
        training = AdversarialTraining(
            self.config,
            judged,
            discriminator_optimizer,
            self.generator,
            self.data,
            seed=ask.seed,
            adversarial=ask.setting("adversarial", bool),
        )
        optimizer = make_local_optimizer(self.config, self.local.model.parameters())
        self.train_local(training.losses, optimizer, ask.seed)

    def ready(self) -> tuple[JudgedClassifier, torch.optim.Optimizer]:
        """Returns the classifier with its discriminator, and the discriminator's optimiser.

        The device's first round creates both, with weights from torch's global generator, which has the ask's seed.
        """
        if self._own is None:
            judged = self._new_judged()
            self._own = judged, adam(self.config, judged.discriminator, self.config.discriminator_lr)
        return self._own

    def _new_judged(self) -> JudgedClassifier:
        return JudgedClassifier(
            self.local.model,
            self._feature_shape,
            sharing=self.config.sharing,
            feature_level=self.config.feature_level,
        ).to(self.local.torch_device)

    # --- what is sent

    def _weights(self) -> dict[str, Kind]:
        """Returns the generator and, with `upload_model`, the classifier."""
        model = {"parameters": model_parameters(self.local.model)} if self.config.upload_model else {}
        generator = Generator(parameters=model_parameters(self.generator), noise_size=self.config.noise_dim)
        return {**model, "generator": generator}

    def _discriminator(self) -> Discriminator:
        sharing = self.config.sharing
        scope = "head" if sharing else "discriminator"
        parameters = model_parameters(self.ready()[0].discriminator, scope=scope)
        return Discriminator(parameters=parameters, shares_extractor=sharing)

    def samples(self, ask: Ask) -> Tensor:
        """Returns the round's distillation samples `[M, ...]` for the seed in the ask's plan."""
        seed = ask.setting("noise_seed", int)
        return distillation_samples(self.generator, seed, self.config.kd_samples, self.local.torch_device)

    def _predictions(self, samples: Tensor, ask: Ask) -> WeightedPredictions:
        """Returns u = f * s on samples `[M, ...]`, in eval mode."""
        judged, _ = self.ready()
        realness_m = extract(judged.realness, samples) if self.config.correlation else None
        probs_mc = soft_targets(extract(judged.classify_generated, samples), self.config.temperature)
        values = weighted_predictions(realness_m, probs_mc).float().numpy()
        return WeightedPredictions(noise_seed=ask.setting("noise_seed", int), values=values)

    # --- state

    def fleet_model(self, ask: Ask) -> torch.nn.Module | None:
        """Returns the global classifier, or None for a device that runs a different one."""
        return with_parameters(self.local.model, ask) if "parameters" in ask.parts else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the device's discriminator and of its optimiser; None before the first round."""
        if self._own is None:
            return {"discriminator": None, "optimizer": None}
        judged, optimizer = self._own
        return {"discriminator": judged.discriminator.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._own = None
        if state["discriminator"] is not None:
            judged, optimizer = self.ready()
            judged.discriminator.load_state_dict(state["discriminator"])
            optimizer.load_state_dict(state["optimizer"])
