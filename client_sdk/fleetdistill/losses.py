"""Loss terms that the device and the server halves of the methods share."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import ConfigurationError, KnowledgeError


def soft_targets(logits: Tensor, temperature: float) -> Tensor:
    """Turns logits into the probabilities that a distillation loss aims at: softmax(logits / τ).

    Args:
        logits: `[..., classes]`, any float dtype; half precision is computed in float32.
        temperature: The papers' τ, finite and greater than 0.

    Returns:
        Probabilities of the same shape, without gradient; each row sums to 1.

    Raises:
        ConfigurationError: `temperature` is out of range.
    """
    _check_temperature(temperature)
    return (_at_least_float32(logits.detach()) / temperature).softmax(dim=-1)


def distillation_loss(
    student_logits_bc: Tensor,
    teacher_probs_bc: Tensor,
    temperature: float,
    *,
    valid_b: Tensor | None = None,
) -> Tensor:
    """τ² · KL(teacher ‖ softmax(student / τ)), the mean over the rows of the mini-batch.

    The teacher is a constant. A class the teacher rules out (probability 0) adds nothing. The factor τ² keeps
    the gradient's size independent of τ: for large τ the loss tends to half the mean squared distance of
    the centred logits.

    Args:
        student_logits_bc: `[batch, classes]`, finite; half precision is computed in float32.
        teacher_probs_bc: `[batch, classes]`, rows on the simplex, on the student's device. Already softened
            or refined: no temperature is applied to it.
        temperature: The papers' τ, finite and greater than 0.
        valid_b: `[batch]` bool, False where nothing is known about a row. Such a row adds 0, whatever stands in
            its teacher row, and still counts in the mean, as the pseudocode of the methods has it.

    Returns:
        A scalar, at least 0 up to rounding; 0 for an empty batch.

    Raises:
        ConfigurationError: `temperature` is out of range.
        KnowledgeError: The shapes do not agree.

    References:
        Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation,
        eqs. (1), (2), (8); Hinton et al., Distilling the Knowledge in a Neural Network, section 2.
    """
    _check_temperature(temperature)
    _check_shapes(student_logits_bc, teacher_probs_bc, valid_b)
    log_student_bc = (_at_least_float32(student_logits_bc) / temperature).log_softmax(dim=-1)
    target_bc = teacher_probs_bc.detach().to(log_student_bc.dtype)
    if valid_b is not None:
        target_bc = torch.where(valid_b[:, None], target_bc, 0.0)  # 0 · log 0 = 0: value and gradient vanish
    divergence = functional.kl_div(log_student_bc, target_bc, reduction="sum")
    return temperature**2 * divergence / max(len(student_logits_bc), 1)


def _at_least_float32(values: Tensor) -> Tensor:
    """Float16 overflows at 65,504 and rounds small probabilities to 0; bfloat16 keeps 3 digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigurationError(f"temperature is {temperature}, must be a finite number > 0")


def _check_shapes(student_bc: Tensor, teacher_bc: Tensor, valid_b: Tensor | None) -> None:
    # Checked because a [classes] teacher would broadcast silently over the batch.
    if student_bc.ndim != 2 or student_bc.shape != teacher_bc.shape:
        raise KnowledgeError(
            f"student logits have shape {list(student_bc.shape)} and teacher probabilities {list(teacher_bc.shape)}; "
            "both must be the same [batch, classes]"
        )
    if valid_b is not None and (valid_b.shape != student_bc.shape[:1] or valid_b.dtype != torch.bool):
        raise KnowledgeError(
            f"valid_b is {valid_b.dtype} of shape {list(valid_b.shape)}, must be torch.bool of [{len(student_bc)}]"
        )
