"""DaFKD: what both halves agree on, and what the device does.

Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023. A device trains the global classifier on
its own data, and with it a discriminator that tells its own data from generated ones, and the global generator. On
generated samples the server lets each device's predictions count as much as its discriminator recognises the sample,
and distils them into the mean of the classifiers. The discriminator is sent, or stays and weighs predictions that are
sent instead (`discriminator_location`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Discriminator, Generator, Kind, ModelParameters, WeightedPredictions
from fleetdistill.methods.base import (
    Answer,
    Ask,
    DeviceMethod,
    Local,
    answers,
    check_choice,
    check_range,
    with_parameters,
)
from fleetdistill.methods.local import LocalTraining, make_local_optimizer
from fleetdistill.models import GENERATORS
from fleetdistill.names import unknown_name
from fleetdistill.training.portable_noise import portable_noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fleetdistill.models.dafkd import NoiseGenerator
    from fleetdistill.models.discriminators import JudgedClassifier

_CHOICES = {
    "discriminator_location": ("server", "device"),
    "sync": ("lagged", "exact"),
    "generator_level": ("input", "feature"),
    "ensemble_space": ("probs", "logits"),
    "generator_loss": ("nonsaturating", "minimax"),
    "aggregation": ("uniform", "samples"),
}
# What is made of them is as large; more would fill a device's memory.
_MOST_NOISE, _MOST_SAMPLES = 4096, 100_000
_PAPERS_GENERATOR = "embedding_generator"
_DEFAULT_GENERATORS = {"input": "dafkd_generator", "feature": "feature_generator"}


@dataclass(frozen=True, kw_only=True)
class DaFKDConfig(LocalTraining):
    """Settings of DaFKD beside those of local training. Names and ranges are those of the specification.

    Attributes:
        participation_ratio: The paper's r.
        sharing: The discriminator shares all layers but the last with the classifier; otherwise it is a network of its
            own.
        correlation: Devices count by their discriminators; otherwise all alike (the "no correlation" ablation).
        discriminator_location: `server` sends the discriminator; `device` keeps it and sends weighted predictions.
        sync: With the discriminator on the device, `lagged` predicts on samples of the generator from before the
            round, `exact` on those of the round's mean, in a second exchange.
        upload_model: Devices send their classifiers. False needs `discriminator_location = "device"`; the global
            classifier then learns from predictions alone, and devices may run classifiers of their own.
        generator_level: The generator makes inputs, or features where the last layer reads them.
        generator: A name of `fleetdistill.models.GENERATORS`; None means `dafkd_generator`, as in the authors' code, or
            at feature level `feature_generator`, as in the paper.
        label_condition: The generator is told a label; None means at feature level only.
        noise_dim: The paper's d, numbers in one noise vector, 1 to 4,096.
        generator_loss: `nonsaturating`, or the paper's `minimax`.
        lambda_adv: Weight of the discriminator's loss beside the classifier's, at least 0. The authors' code has 2.
        gradient_penalty: Weight of the penalty on the discriminator's slope, at least 0. The authors' code has 0.3.
        generator_lr: Learning rate of the generator's Adam, which starts afresh in each round, above 0.
        discriminator_lr: Of the discriminator's Adam, which goes on from round to round, above 0.
        adversarial_weight_decay: Of both, at least 0.
        gan_stop_round: Rounds in which generator and discriminator are trained, at least 0; None for all.
        gan_stop_epoch: Local epochs in which they are trained, at least 0; None for all.
        aggregation: Mean of classifiers and generators over devices: `uniform`, or weighted by `samples`.
        kd_samples: The paper's M, generated samples to distil on, 1 to 100,000.
        kd_epochs: Passes over them in a round, at least 0.
        kd_lr: Learning rate of the server's distillation, above 0; optimiser and weight decay are the devices'.
        temperature: τ of the distillation, above 0.
        ensemble_space: The server averages probabilities (the paper's eq. 8) or logits (the authors' code).
        kd_start_round: First completed round, from 1, whose end is distilled: a young generator teaches nothing.
        maturity_guard: Do not distil while the ensemble sees fewer than half of the classes in the generated samples;
            with more than ten classes fewer than half of those that it has in view, or fewer than five.
        freeze_batch_norm: Generated samples do not enter the statistics of batch-norm layers.
        paper: The paper's values of all settings that are not given: its generator, minimax loss, distillation from the
            first round on, no guard, batch-norm statistics from generated samples, 20 local epochs, weight decay 0.001
            everywhere and `kd_lr` 0.01.
    """

    local_epochs: int = 5
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    sharing: bool = True
    correlation: bool = True
    discriminator_location: str = "server"
    sync: str = "lagged"
    upload_model: bool = True
    generator_level: str = "input"
    generator: str | None = None
    label_condition: bool | None = None
    noise_dim: int = 100
    generator_loss: str = "nonsaturating"
    lambda_adv: float = 1.0
    gradient_penalty: float = 0.0
    generator_lr: float = 1e-3
    discriminator_lr: float = 1e-3
    adversarial_weight_decay: float = 0.0
    gan_stop_round: int | None = None
    gan_stop_epoch: int | None = None
    aggregation: str = "uniform"
    kd_samples: int = 1280
    kd_epochs: int = 5
    kd_lr: float = 1e-3
    temperature: float = 1.0
    ensemble_space: str = "probs"
    kd_start_round: int = 3
    maturity_guard: bool = True
    freeze_batch_norm: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        self._check_ranges()
        self._check_variant()

    def _check_ranges(self) -> None:
        check_range("kd_start_round", self.kd_start_round, 1)
        for name, most in (("noise_dim", _MOST_NOISE), ("kd_samples", _MOST_SAMPLES)):
            check_range(name, getattr(self, name), 1, most + 1)
        for name in ("generator_lr", "discriminator_lr", "kd_lr", "temperature"):
            check_range(name, getattr(self, name), 0, open_low=True)
        for name in ("lambda_adv", "gradient_penalty", "adversarial_weight_decay", "kd_epochs"):
            check_range(name, getattr(self, name), 0)
        for name in ("gan_stop_round", "gan_stop_epoch"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0)
        if self.generator is not None and self.generator not in GENERATORS:
            raise ConfigurationError(unknown_name("generator", self.generator, sorted(GENERATORS)))

    def _check_variant(self) -> None:
        on_device = self.discriminator_location == "device"
        if self.feature_level and not self.sharing:
            raise ConfigurationError("feature-level generator needs sharing")
        if not self.upload_model and not (on_device and self.ensemble_space == "probs"):
            raise ConfigurationError(
                "upload_model=false needs device-side importance and ensemble_space='probs'; "
                "set discriminator_location = 'device'"
            )
        if on_device and self.ensemble_space != "probs":
            raise ConfigurationError("discriminator_location='device' sends probabilities: use ensemble_space='probs'")

    def for_classes(self, classes: int) -> DaFKDConfig:
        """The same settings with the generator filled in."""
        return replace(
            self,
            generator=self.generator or _DEFAULT_GENERATORS[self.generator_level],
            label_condition=self.feature_level if self.label_condition is None else self.label_condition,
        )

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; its EMNIST alone has 40 epochs. At feature level the generator is the paper's by default."""
        of_images = {"generator": _PAPERS_GENERATOR, "label_condition": True}
        return {
            **(of_images if given.get("generator_level", cls.generator_level) == "input" else {}),
            "local_epochs": 20,
            "weight_decay": 1e-3,
            "generator_loss": "minimax",
            "adversarial_weight_decay": 1e-3,
            "kd_lr": 0.01,
            "kd_start_round": 1,
            "maturity_guard": False,
            "freeze_batch_norm": False,
        }

    @property
    def feature_level(self) -> bool:
        """Whether generated samples are features."""
        return self.generator_level == "feature"

    @property
    def exact(self) -> bool:
        """Whether devices predict in an exchange of its own, on samples of the round's mean generator."""
        return self.discriminator_location == "device" and self.sync == "exact"

    @property
    def lagged(self) -> bool:
        """Whether devices predict in the exchange in which they train, on samples of the generator from before."""
        return self.discriminator_location == "device" and self.sync == "lagged"


def make_generator(config: DaFKDConfig, shape: tuple[int, ...], classes: int) -> NoiseGenerator:
    """The generator of a configuration that is complete for its number of classes, with fresh weights.

    Args:
        config: As `for_classes` gives it.
        shape: Shape of one sample: an input, or the features that the last layer reads.
        classes: C of the contract.
    """
    from fleetdistill.models import build_generator

    assert config.generator is not None
    labels = classes if config.label_condition else 0
    return build_generator(config.generator, shape=shape, noise_dim=config.noise_dim, classes=labels)


def distillation_samples(generator: NoiseGenerator, noise_seed: int, count: int, device: torch.device) -> Tensor:
    """The samples `[count, *shape]` that a seed names: the same for every device and the server, in eval mode.

    A generator with labels gets label i modulo C for sample i.
    """
    import torch

    from fleetdistill.training.local_training import extract

    noise_md = torch.from_numpy(portable_noise(noise_seed, count, generator.noise_dim))
    rows = torch.arange(count)

    def generate(rows_b: Tensor) -> Tensor:
        labels_b = (rows_b % generator.classes).to(device) if generator.classes else None
        return generator(noise_md[rows_b.cpu()].to(device), labels_b)  # type: ignore[no-any-return]

    return extract(generate, rows, model=generator).to(device)


class DaFKDDevice(DeviceMethod):
    """Device half: trains classifier, discriminator and generator against each other, on its own data."""

    config: DaFKDConfig
    metrics_steps = ("train",)

    def __init__(self, config: DaFKDConfig, local: Local) -> None:
        from fleetdistill.models.discriminators import shared_features
        from fleetdistill.training.local_training import TensorData, extract

        super().__init__(config, local)
        if config.exact:
            self.metrics_steps = ("predict",)  # type: ignore[misc]  # which of its steps ends a round is a setting
        first = extract(lambda x: shared_features(local.model, x), local.data.inputs[:1], model=local.model)
        self._feature_shape = tuple(first.shape[1:])
        shape = self._feature_shape if config.feature_level else tuple(local.data.inputs.shape[1:])
        self._generator = make_generator(config, shape, local.classes).to(local.torch_device)
        self._data = TensorData(local.data.inputs.to(local.torch_device), local.data.labels.to(local.torch_device))
        self._own: tuple[JudgedClassifier, torch.optim.Optimizer] | None = None

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Eqs. (9) and (3) over the local epochs; with it, predictions on samples of the generator as it was sent."""
        from fleetdistill.training.parameters import model_parameters, take_weights

        adversarial = ask.setting("adversarial", bool)
        if "parameters" in ask.parts:  # stays away from a device whose classifier is its own
            take_weights(self.local.model, ask.part("parameters", ModelParameters))
        take_weights(self._generator, ask.part("generator", Generator).parameters)
        shared = self._samples(ask) if self.config.lagged else None
        self._train(ask.seed, adversarial=adversarial)
        parts: dict[str, Kind] = {}
        if self.config.upload_model:
            parts["parameters"] = model_parameters(self.local.model)
        parts["generator"] = Generator(parameters=model_parameters(self._generator), noise_size=self.config.noise_dim)
        if shared is not None:
            parts["predictions"] = self._predictions(shared, ask)
        elif not self.config.exact:
            parts["discriminator"] = self._discriminator()
        return Answer(parts=parts, samples=len(self.local.data))

    @answers("predict")
    def predict(self, ask: Ask) -> Answer:
        """The second exchange of `exact`: predictions on samples of the round's mean generator."""
        from fleetdistill.training.parameters import take_weights

        take_weights(self._generator, ask.part("generator", Generator).parameters)
        return Answer(parts={"predictions": self._predictions(self._samples(ask), ask)}, samples=len(self.local.data))

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """The end result: the global classifier becomes the device's."""
        from fleetdistill.training.parameters import take_weights

        take_weights(self.local.model, ask.part("parameters", ModelParameters))
        return Answer(parts={}, samples=len(self.local.data))

    # --- training

    def _train(self, seed: int, *, adversarial: bool) -> None:
        import torch

        from fleetdistill.methods.dafkd.training import AdversarialTraining
        from fleetdistill.training.local_training import train_steps

        judged, discriminator_optimizer = self._ready()
        judged.discriminator.train()
        self._generator.train()
        training = AdversarialTraining(
            self.config,
            judged,
            discriminator_optimizer,
            self._generator,
            self._data,
            seed=seed,
            adversarial=adversarial,
        )
        self.trained = train_steps(
            self.local.model,
            len(self._data),
            epochs=self.config.local_epochs,
            batch_size=self.config.batch_size,
            optimizer=make_local_optimizer(self.config, self.local.model.parameters()),
            losses=training.losses,
            generator=torch.Generator().manual_seed(seed),
            device=self.local.torch_device,
        )

    def _ready(self) -> tuple[JudgedClassifier, torch.optim.Optimizer]:
        """Classifier with discriminator, and the latter's optimiser; both are new in the device's first round.

        New weights come from torch's global generator, which the ask's seed has set.
        """
        from fleetdistill.methods.dafkd.training import adam

        if self._own is None:
            judged = self._new_judged()
            self._own = judged, adam(self.config, judged.discriminator, self.config.discriminator_lr)
        return self._own

    def _new_judged(self) -> JudgedClassifier:
        from fleetdistill.models.discriminators import JudgedClassifier

        return JudgedClassifier(
            self.local.model,
            self._feature_shape,
            sharing=self.config.sharing,
            feature_level=self.config.feature_level,
        ).to(self.local.torch_device)

    # --- what is sent

    def _discriminator(self) -> Discriminator:
        from fleetdistill.training.parameters import model_parameters

        sharing = self.config.sharing
        scope = "head" if sharing else "discriminator"
        parameters = model_parameters(self._ready()[0].discriminator, scope=scope)
        return Discriminator(parameters=parameters, shares_extractor=sharing)

    def _samples(self, ask: Ask) -> Tensor:
        """The round's distillation samples, by the seed that the server sent."""
        seed = ask.setting("noise_seed", int)
        return distillation_samples(self._generator, seed, self.config.kd_samples, self.local.torch_device)

    def _predictions(self, samples: Tensor, ask: Ask) -> WeightedPredictions:
        """u = f * s, in eval mode; the discriminator stays here."""
        from fleetdistill.methods.dafkd.losses import weighted_predictions
        from fleetdistill.training.local_training import extract
        from fleetdistill.training.losses import soft_targets

        judged, _ = self._ready()
        verdict_m = extract(judged.judge, samples) if self.config.correlation else None
        probs_mc = soft_targets(extract(judged.answer, samples), self.config.temperature)
        values = weighted_predictions(verdict_m, probs_mc).float().numpy()
        return WeightedPredictions(noise_seed=ask.setting("noise_seed", int), values=values)

    # --- state

    def brought(self, ask: Ask) -> torch.nn.Module | None:
        """The global classifier; None where it stays away from a device whose classifier is its own."""
        return with_parameters(self.local.model, ask) if "parameters" in ask.parts else None

    def state_dict(self) -> dict[str, Any]:
        """The discriminator, which is the device's own for the whole run, and its optimiser."""
        if self._own is None:
            return {"discriminator": None, "optimizer": None}
        judged, optimizer = self._own
        return {"discriminator": judged.discriminator.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores discriminator and optimiser, or that there are none yet."""
        self._own = None
        if state["discriminator"] is not None:
            judged, optimizer = self._ready()
            judged.discriminator.load_state_dict(state["discriminator"])
            optimizer.load_state_dict(state["optimizer"])
