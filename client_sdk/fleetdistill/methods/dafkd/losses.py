"""Losses of DaFKD's discriminator and generator, in their numerically stable form with logits.

A discriminator's logit a(x) gives the probability f(x) = sigmoid(a(x)) that x is a sample of the device's own data. For
own data of density p and a fixed generator of density p_g, the optimal f is p / (p + p_g).

References:
    Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

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
