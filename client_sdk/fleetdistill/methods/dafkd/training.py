"""DaFKD's training on a device: each mini-batch trains classifier and discriminator, then the generator."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import KnowledgeError
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.losses import adversarial_loss, generator_loss, gradient_penalty
from fleetdistill.models.dafkd import NoiseGenerator
from fleetdistill.models.discriminators import JudgedClassifier
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import LazyData, TensorData
from fleetdistill.training.model import frozen_batch_norm


def adam(config: DaFKDConfig, module: torch.nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Returns a new optimiser for a discriminator or a generator."""
    return torch.optim.Adam(module.parameters(), lr=learning_rate, weight_decay=config.adversarial_weight_decay)


class AdversarialTraining:
    """A device's training in one round. `train_local` takes `losses` and steps the classifier's optimiser.

    Args:
        config: The method's settings.
        judged: Classifier and discriminator.
        discriminator_optimizer: Optimiser of the discriminator, kept from round to round.
        generator: The global generator; each round has a new optimiser for it.
        data: The device's samples, on the device that computes.
        seed: Seed of the noise.
        adversarial: Whether discriminator and generator are trained in this round.
    """

    def __init__(
        self,
        config: DaFKDConfig,
        judged: JudgedClassifier,
        discriminator_optimizer: torch.optim.Optimizer,
        generator: NoiseGenerator,
        data: TensorData | LazyData,
        *,
        seed: int,
        adversarial: bool,
    ) -> None:
        self._config = config
        self._judged = judged
        self._discriminator_optimizer = discriminator_optimizer
        self._generator = generator
        self._generator_optimizer = adam(config, generator, config.generator_lr)
        self._data = data
        self._random = torch.Generator().manual_seed(derive_seed(seed, "noise"))
        stop = config.gan_stop_epoch
        self._adversarial_epochs = 0.0 if not adversarial else math.inf if stop is None else stop

    def losses(self, epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
        """Yields the loss of the classifier's step on one mini-batch, and steps the other two networks."""
        x, labels_b = self._data.draw(rows_b), self._data.labels[rows_b]
        if epoch >= self._adversarial_epochs:
            yield functional.cross_entropy(self._judged.classifier(x), labels_b)
            return
        fake = self._generate(len(x)).detach()  # samples of theta^g
        if self._judged.sharing:
            yield self.joint_loss(x, labels_b, fake)  # eq. (9)
            self._step_discriminator()  # uses the gradient of the same backward pass
        else:
            yield functional.cross_entropy(self._judged.classifier(x), labels_b)
            self._train_discriminator(x, fake)  # eq. (2)
        self.step_generator(len(x))  # eq. (3)

    def _train_discriminator(self, x: Tensor, fake: Tensor) -> None:
        """Takes the step of a discriminator that does not share layers with the classifier."""
        loss = self.discriminator_loss(self._judged.discriminator(x), x, fake)
        _check_finite(loss, "discriminator")  # guard
        loss.backward()
        self._step_discriminator()

    def joint_loss(self, x: Tensor, labels_b: Tensor, fake: Tensor) -> Tensor:
        """Returns eq. (9): the classifier's loss plus lambda_adv times the discriminator's, from one forward pass."""
        features = self._judged.features(x)
        own = functional.cross_entropy(self._judged.classify(features), labels_b)
        real = features if self._judged.feature_level else x
        against = self.discriminator_loss(self._judged.discriminator(features), real, fake)
        return own + self._config.lambda_adv * against

    def discriminator_loss(self, real_b: Tensor, real: Tensor, fake: Tensor) -> Tensor:
        """Returns eq. (2), plus the gradient penalty with a weight above 0.

        With `freeze_batch_norm`, generated samples do not change batch-norm statistics.
        """
        with frozen_batch_norm(self._judged, self._config.freeze_batch_norm):
            loss = adversarial_loss(real_b, self._judged.realness(fake))
            if self._config.gradient_penalty > 0:
                mix_b = torch.rand(len(real), generator=self._random).to(real.device)
                slope = gradient_penalty(self._judged.realness, real, fake[: len(real)], mix_b)
                loss = loss + self._config.gradient_penalty * slope
        return loss

    def _step_discriminator(self) -> None:
        self._discriminator_optimizer.step()
        self._discriminator_optimizer.zero_grad(set_to_none=True)

    def step_generator(self, count: int) -> None:
        """Takes the generator's step, eq. (3), on new noise; the other networks and their statistics are frozen."""
        with frozen_batch_norm(self._judged):
            loss = generator_loss(self._judged.realness(self._generate(count)), self._config.generator_loss)
        self._generator_optimizer.zero_grad(set_to_none=True)
        _check_finite(loss, "generator")  # guard
        loss.backward(inputs=list(self._generator.parameters()))
        self._generator_optimizer.step()

    def _generate(self, count: int) -> Tensor:
        """Returns `count` generated samples, but at least two, because the generator has batch-norm."""
        device, generator = self._data.labels.device, self._generator
        noise_bd = torch.randn(max(count, 2), generator.noise_dim, generator=self._random)
        labels_b = None
        if generator.classes:
            labels_b = torch.randint(generator.classes, (len(noise_bd),), generator=self._random).to(device)
        return generator(noise_bd.to(device), labels_b)  # type: ignore[no-any-return]  # a module's call


def _check_finite(loss: Tensor, name: str) -> None:
    if not bool(loss.isfinite()):
        raise KnowledgeError(
            f"the {name}'s loss is {loss.item()}; its learning rate ({name}_lr) or lambda_adv is probably too large, "
            "lower it"
        )
