"""Ensembles of models whose say differs from sample to sample: each counts where its own discriminator feels at home.

References:
    Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, eqs. (7) and (8).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_LEAST_TOTAL = 1e-30
_NO_COLLAPSE = 5
"""So many classes in generated samples are not those of a generator that has collapsed."""


def importance_weights(realness_km: Tensor) -> Tensor:
    """Eq. (7): f_k / sum over k of f, as a softmax over k of ln f, which cannot divide by zero.

    Args:
        realness_km: The discriminators' logits for every sample, `[devices, M]`, finite.

    Returns:
        `[devices, M]` float64; each column sums to 1.
    """
    return (-functional.softplus(-realness_km.double())).softmax(dim=0)


def equal_weights(devices: int, samples: int) -> Tensor:
    """No correlation: every device counts alike, `[devices, M]` float64."""
    return torch.full((devices, samples), 1 / devices, dtype=torch.float64)


def ensemble(weights_km: Tensor, logits_kmc: Tensor, temperature: float, space: str) -> Tensor:
    """The teacher of eq. (8): the weighted mean of all devices' soft predictions.

    Args:
        weights_km: `[devices, M]`, columns sum to 1.
        logits_kmc: `[devices, M, classes]`, finite.
        temperature: The papers' τ, above 0.
        space: `probs` averages softmax(logits / τ) as the equation does; `logits` takes the softmax of the averaged
            logits as the authors' code does, which lets a sure device outvote the others.

    Returns:
        `[M, classes]` float64; each row sums to 1.
    """
    scaled_kmc = logits_kmc.double() / temperature
    if space == "logits":
        return torch.einsum("km,kmc->mc", weights_km, scaled_kmc).softmax(dim=-1)
    return torch.einsum("km,kmc->mc", weights_km, scaled_kmc.softmax(dim=-1))


def ensemble_of_weighted(weighted_mc: Tensor) -> tuple[Tensor, Tensor]:
    """The same teacher from the sum of predictions that devices have weighted themselves; only the sum is needed.

    Args:
        weighted_mc: The sum over devices of f_k(x) * s_k(x), `[M, classes]`, at least 0.

    Returns:
        The teacher `[M, classes]` float64, and `[M]` bool, False where all importance has vanished and a row of the
        teacher means nothing.
    """
    total_m1 = weighted_mc.double().sum(dim=-1, keepdim=True)
    usable_m = total_m1[:, 0] >= _LEAST_TOTAL
    return weighted_mc.double() / total_m1.clamp_min(_LEAST_TOTAL), usable_m


def effective_devices(weights_km: Tensor) -> float:
    """exp(entropy) of the weights, mean over the samples: how many devices speak about a sample.

    Args:
        weights_km: `[devices, M]`, columns sum to 1.

    Returns:
        Between 1 (each sample has one expert) and the number of devices (the weights are idle).
    """
    entropy_m = -torch.special.xlogy(weights_km, weights_km).sum(dim=0)
    return float(entropy_m.exp().mean())


def classes_needed(teacher_mc: Tensor) -> int:
    """Classes that must be the teacher's best for some sample before its generator counts as mature.

    Half of the classes in view, those whose mean probability over the samples is at least an equal share 1 / C, but
    never fewer than half of all classes or five, whichever is less: a young generator makes samples of one or two. With
    up to ten classes that is half of all. With many, no ensemble has half of them as its best answers.

    Args:
        teacher_mc: `[M, classes]`, rows on the simplex.

    Returns:
        At least 1; more than there can be where there is no sample.
    """
    classes = teacher_mc.shape[-1]
    in_view = int((teacher_mc.mean(dim=0) >= 1 / classes).sum()) if len(teacher_mc) else classes
    return math.ceil(max(in_view / 2, min(classes / 2, _NO_COLLAPSE)))
