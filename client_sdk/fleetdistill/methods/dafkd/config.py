"""Settings of DaFKD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import (
    check_choice,
    check_range,
)
from fleetdistill.methods.local import LocalTraining
from fleetdistill.models import GENERATORS
from fleetdistill.names import unknown_name

_CHOICES = {
    "discriminator_location": ("server", "device"),
    "sync": ("lagged", "exact"),
    "generator_level": ("input", "feature"),
    "ensemble_space": ("probs", "logits"),
    "generator_loss": ("nonsaturating", "minimax"),
    "aggregation": ("uniform", "samples"),
}
_PAPERS_GENERATOR = "embedding_generator"
_DEFAULT_GENERATORS = {"input": "dafkd_generator", "feature": "feature_generator"}
# These settings determine sizes of tensors; larger tensors could fill a device's memory.
_MAX_NOISE, _MAX_SAMPLES = 4096, 100_000


@dataclass(frozen=True, kw_only=True)
class DaFKDConfig(LocalTraining):
    """Settings of DaFKD in addition to those of local training.

    Attributes:
        participation_ratio: The paper's r.
        sharing: Whether the discriminator shares all layers but the last with the classifier; otherwise it is a
            separate network.
        correlation: Whether the discriminators weight the devices' predictions; otherwise all devices have the same
            weight (the paper's "no correlation" ablation).
        discriminator_location: `server`: devices send their discriminators. `device`: devices keep them and send
            weighted predictions.
        sync: With the discriminator on the device, `lagged` predicts on samples of the generator at the start of the
            round, `exact` on samples of the round's mean generator, in a second exchange.
        upload_model: Whether devices send their classifiers. False needs `discriminator_location = "device"`: the
            global classifier then learns only from predictions, and devices may run different classifiers.
        generator_level: `input`: the generator makes inputs. `feature`: it makes inputs of the last layer.
        generator: A key of `fleetdistill.models.GENERATORS`. None means `dafkd_generator`, as in the authors' code, or
            at feature level `feature_generator`, as in the paper.
        label_condition: Whether the generator has a label as an input; None means at feature level only.
        noise_dim: The paper's d, numbers of a noise vector, 1 to 4,096.
        generator_loss: `nonsaturating`, or the paper's `minimax`.
        lambda_adv: Weight of the discriminator's loss in eq. (9), at least 0. The authors' code has 2.
        gradient_penalty: Weight of the discriminator's gradient penalty, at least 0. The authors' code has 0.3.
        generator_lr: Learning rate of the generator's Adam, above 0; each round has a new optimiser.
        discriminator_lr: Learning rate of the discriminator's Adam, above 0; a device keeps its optimiser.
        adversarial_weight_decay: Weight decay of both, at least 0.
        gan_stop_round: Number of rounds that train generator and discriminator, at least 0; None for all.
        gan_stop_epoch: Number of local epochs that train generator and discriminator, at least 0; None for all.
        aggregation: Mean of classifiers and generators over devices: `uniform`, or weighted by `samples`.
        kd_samples: The paper's M, number of generated samples to distil on, 1 to 100,000.
        kd_epochs: Passes over the generated samples in a round, at least 0.
        kd_lr: Learning rate of the server's distillation, above 0; optimiser and weight decay are the devices'.
        temperature: τ of the distillation, above 0.
        ensemble_space: The ensemble is the mean of probabilities, `probs` (the paper's eq. 8), or of `logits` (the
            authors' code).
        kd_start_round: First completed round after which the server distils, at least 1; samples of an untrained
            generator teach nothing.
        maturity_guard: Whether the server skips distillation while the ensemble recognises too few classes in the
            generated samples: fewer than half of the classes or, with more than ten, fewer than half of those in view
            or fewer than five.
        freeze_batch_norm: Whether generated samples are kept out of the statistics of batch-norm layers.
        paper: Use the paper's values for all other settings: its generator, minimax loss, distillation from the first
            round, no guard, batch-norm statistics from generated samples, 20 local epochs, weight decay 0.001 and
            `kd_lr` 0.01.
    """

    control: ClassVar[Mapping[str, Any]] = MappingProxyType({"correlation": False})

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
        for name, most in (("noise_dim", _MAX_NOISE), ("kd_samples", _MAX_SAMPLES)):
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
            raise ConfigurationError(
                "feature-level generator needs sharing; set sharing = true or generator_level = 'input'"
            )
        if not self.upload_model and not (on_device and self.ensemble_space == "probs"):
            raise ConfigurationError(
                "upload_model=false needs device-side importance and ensemble_space='probs'; set "
                "discriminator_location = 'device' and ensemble_space = 'probs'"
            )
        if on_device and self.ensemble_space != "probs":
            raise ConfigurationError(
                "discriminator_location='device' sends probabilities; set ensemble_space = 'probs'"
            )

    def for_classes(self, classes: int) -> DaFKDConfig:
        """Returns this configuration with the defaults of `generator` and `label_condition` filled in."""
        return replace(
            self,
            generator=self.generator or _DEFAULT_GENERATORS[self.generator_level],
            label_condition=self.feature_level if self.label_condition is None else self.label_condition,
        )

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's values; for EMNIST the paper has 40 epochs. The feature-level default is the paper's."""
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
        """Whether the generator makes features instead of inputs."""
        return self.generator_level == "feature"

    @property
    def exact(self) -> bool:
        """Whether devices predict in a second exchange, on samples of the round's mean generator."""
        return self.discriminator_location == "device" and self.sync == "exact"

    @property
    def lagged(self) -> bool:
        """Whether devices predict in the training exchange, on samples of the generator at the start of the round."""
        return self.discriminator_location == "device" and self.sync == "lagged"
