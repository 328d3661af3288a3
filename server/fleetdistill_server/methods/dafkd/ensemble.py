"""DaFKD's ensembles: each model is weighted sample by sample with its own discriminator's output.

References:
    Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023, eqs. (7) and (8).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_MIN_TOTAL = 1e-30
_NO_COLLAPSE = 5
"""Number of classes in generated samples that rules out a collapsed generator."""


def importance_weights(realness_km: Tensor) -> Tensor:
    """Returns the importance weights of eq. (7), f_k / sum over k of f, as a softmax of ln f to avoid division by zero.

    Args:
        realness_km: Discriminator logits for every sample, `[devices, M]`, finite.

    Returns:
        `[devices, M]` float64; each column sums to 1.
    """
    return (-functional.softplus(-realness_km.double())).softmax(dim=0)


def equal_weights(devices: int, samples: int) -> Tensor:
    """Returns equal weights, `[devices, M]` float64, for the variant without correlation."""
    return torch.full((devices, samples), 1 / devices, dtype=torch.float64)


def ensemble(weights_km: Tensor, logits_kmc: Tensor, temperature: float, space: str) -> Tensor:
    """Returns the teacher of eq. (8): the weighted mean of all devices' soft predictions.

    Args:
        weights_km: `[devices, M]`, columns sum to 1.
        logits_kmc: `[devices, M, classes]`, finite.
        temperature: The paper's τ, above 0.
        space: `probs` averages softmax(logits / τ), as in the equation; `logits` applies the softmax to the averaged
            logits, as in the authors' code, which gives confident devices more weight.

    Returns:
        `[M, classes]` float64; each row sums to 1.
    """
    scaled_kmc = logits_kmc.double() / temperature
    if space == "logits":
        return torch.einsum("km,kmc->mc", weights_km, scaled_kmc).softmax(dim=-1)
    return torch.einsum("km,kmc->mc", weights_km, scaled_kmc.softmax(dim=-1))


def ensemble_of_weighted(weighted_mc: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the teacher of eq. (8) from the sum of predictions that the devices have weighted themselves.

    Args:
        weighted_mc: The sum over devices of f_k(x) * s_k(x), `[M, classes]`, at least 0.

    Returns:
        The teacher `[M, classes]` float64, and `[M]` bool, False for rows whose total importance is 0: their teacher
        is undefined.
    """
    total_m1 = weighted_mc.double().sum(dim=-1, keepdim=True)
    usable_m = total_m1[:, 0] >= _MIN_TOTAL
    return weighted_mc.double() / total_m1.clamp_min(_MIN_TOTAL), usable_m


def effective_devices(weights_km: Tensor) -> float:
    """Returns the effective number of devices per sample: exp(entropy) of the weights, averaged over the samples.

    Args:
        weights_km: `[devices, M]`, columns sum to 1.

    Returns:
        Between 1 (one device has all the weight) and the number of devices (equal weights).
    """
    entropy_m = -torch.special.xlogy(weights_km, weights_km).sum(dim=0)
    return float(entropy_m.exp().mean())


def classes_needed(teacher_mc: Tensor) -> int:
    """Returns how many classes the teacher must predict for at least one sample before distillation starts.

    This is half of the classes whose mean probability over the samples is at least 1 / C, but at least the smaller of
    five and half of all classes. An undertrained generator makes samples of one or two classes only.

    Args:
        teacher_mc: Teacher probabilities `[M, classes]`; M may be 0.

    Returns:
        At least 1.
    """
    classes = teacher_mc.shape[-1]
    in_view = int((teacher_mc.mean(dim=0) >= 1 / classes).sum()) if len(teacher_mc) else classes
    return math.ceil(max(in_view / 2, min(classes / 2, _NO_COLLAPSE)))
