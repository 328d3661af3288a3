"""Losses of a discriminator and of the generator that it judges, in the stable form with logits.

A discriminator's logit a(x) says how likely x is a sample of the device's own data: f(x) = sigmoid(a(x)), one half
where it cannot tell. For a fixed generator with density p_g its best answer is p / (p + p_g).

References:
    Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

LEAST_IMPORTANCE = 1e-12
"""What f counts for at least where it multiplies predictions, so that they do not vanish in float32."""


def adversarial_loss(real_b: Tensor, fake_b: Tensor) -> Tensor:
    """Eq. (2): -log f for real and -log(1 - f) for generated samples, the mean over all of them together.

    Args:
        real_b: The discriminator's logits of real samples, `[real]`.
        fake_b: Its logits of generated samples, `[generated]`; at least one of the two is not empty.

    Returns:
        A scalar, at least 0.
    """
    total = functional.softplus(-real_b).sum() + functional.softplus(fake_b).sum()
    return total / (len(real_b) + len(fake_b))


def generator_loss(fake_b: Tensor, kind: str) -> Tensor:
    """Eq. (3) as something to minimise: small where the discriminator takes generated samples for real ones.

    The paper maximises -log(1 - f) (`minimax`), whose gradient vanishes where the discriminator is sure and which has
    no lower bound as a loss. `nonsaturating` minimises -log f, whose gradient is largest there.

    Args:
        fake_b: The discriminator's logits of generated samples, `[batch]`, with the graph to the generator.
        kind: `nonsaturating` or `minimax`.

    Returns:
        A scalar; never negative for `nonsaturating`, never positive for `minimax`.
    """
    if kind == "minimax":
        return -functional.softplus(fake_b).mean()
    return functional.softplus(-fake_b).mean()


def gradient_penalty(discriminator: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, mix_b: Tensor) -> Tensor:
    """Mean of (|df/dx| - 1)^2 at points between real and generated samples; keeps the discriminator smooth.

    Args:
        discriminator: Samples to the discriminator's logits `[batch]`.
        real, fake: `[batch, ...]`, of one shape.
        mix_b: `[batch]` in [0, 1], how much of each point is real.

    Returns:
        A scalar, at least 0. The norm is over all numbers of a sample; the authors' code takes it over channels only.
    """
    mix = mix_b.view(-1, *[1] * (real.ndim - 1))
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(between).sigmoid().sum(), between, create_graph=True)
    return cast(Tensor, (slope.flatten(1).norm(dim=1) - 1).square().mean())


def weighted_predictions(realness_m: Tensor | None, probs_mc: Tensor) -> Tensor:
    """A device's predictions times its own importance: u = f(x) * s(x), what it sends instead of its discriminator.

    A row of u sums to f, so that the server needs no other weight.

    Args:
        realness_m: The discriminator's logits `[M]`; None where all devices count alike (f = 1).
        probs_mc: Soft predictions `[M, classes]`, rows on the simplex.

    Returns:
        `[M, classes]` float64, at least 0.
    """
    if realness_m is None:
        return probs_mc.double()
    return realness_m.double().sigmoid().clamp_min(LEAST_IMPORTANCE)[:, None] * probs_mc.double()
