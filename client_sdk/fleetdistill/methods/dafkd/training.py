"""DaFKD's training on a device: each mini-batch trains classifier and discriminator, then the generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import KnowledgeError
from fleetdistill.methods.dafkd.config import DaFKDConfig
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


# --- Losses of DaFKD's discriminator and generator, in their numerically stable form with logits.
#
# A discriminator's logit a(x) gives the probability f(x) = sigmoid(a(x)) that x is a sample of the device's own data.
# For own data of density p and a fixed generator of density p_g, the optimal f is p / (p + p_g).
#
# References:
#     Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, section 3.

MIN_IMPORTANCE = 1e-12
"""Lower bound of f where it multiplies predictions, so that they do not underflow in float32."""


def adversarial_loss(real_b: Tensor, fake_b: Tensor) -> Tensor:
    """Returns the discriminator's loss, eq. (2): the mean of -log f of real and -log(1 - f) of generated samples.

    Args:
        real_b: The discriminator's logits of real samples, `[real]`.
        fake_b: The discriminator's logits of generated samples, `[generated]`. One of the two may be empty.

    Returns:
        A scalar, at least 0.
    """
    total = functional.softplus(-real_b).sum() + functional.softplus(fake_b).sum()
    return total / (len(real_b) + len(fake_b))


def generator_loss(fake_b: Tensor, kind: str) -> Tensor:
    """Returns the generator's loss, eq. (3) as a minimisation: small if the discriminator accepts generated samples.

    The paper maximises -log(1 - f) (`minimax`). Its gradient vanishes where the discriminator is certain, and as a loss
    it has no lower bound. `nonsaturating` minimises -log f, whose gradient is largest there.

    Args:
        fake_b: The discriminator's logits of generated samples, `[batch]`, with the generator's autograd graph.
        kind: `nonsaturating` or `minimax`.

    Returns:
        A scalar; never negative for `nonsaturating`, never positive for `minimax`.
    """
    if kind == "minimax":
        return -functional.softplus(fake_b).mean()
    return functional.softplus(-fake_b).mean()


def gradient_penalty(discriminator: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix_b: Tensor) -> Tensor:
    """Returns the mean of (|df/dx| - 1)^2 at points between real and generated samples.

    The penalty keeps the discriminator smooth. The norm is over all numbers of a sample; in the authors' code it is
    over channels only.

    Args:
        discriminator: Function from samples to the discriminator's logits `[batch]`.
        real: Real samples, `[batch, ...]`.
        fake: Generated samples, in the shape of `real`.
        mix_b: Share of the real sample in each point, `[batch]` in [0, 1].

    Returns:
        A scalar, at least 0.
    """
    mix = mix_b.view(-1, *[1] * (real.ndim - 1))
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(between).sigmoid().sum(), between, create_graph=True)
    return cast(Tensor, (slope.flatten(1).norm(dim=1) - 1).square().mean())


def weighted_predictions(realness_m: Tensor | None, probs_mc: Tensor) -> Tensor:
    """Returns a device's predictions weighted by its discriminator, u = f(x) * s(x).

    A device sends u instead of its discriminator. A row of u sums to f, so the server needs no other weight.

    Args:
        realness_m: The discriminator's logits a(x), `[M]`; None gives all devices the same weight (f = 1).
        probs_mc: Soft predictions s(x), `[M, classes]`; each row sums to 1.

    Returns:
        `[M, classes]` float64, at least 0.
    """
    if realness_m is None:
        return probs_mc.double()
    return realness_m.double().sigmoid().clamp_min(MIN_IMPORTANCE)[:, None] * probs_mc.double()
