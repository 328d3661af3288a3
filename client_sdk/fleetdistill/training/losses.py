"""Loss terms used by both device and server halves of the methods."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import ConfigurationError, KnowledgeError

__all__ = [
    "activation_divergence",
    "distillation_loss",
    "euclidean_distance",
    "feature_distance",
    "js_divergence",
    "soft_cross_entropy",
    "soft_targets",
]


def soft_targets(logits: Tensor, temperature: float) -> Tensor:
    """Returns softmax(logits / τ), the target probabilities of a distillation loss.

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
    class_weights: Tensor | None = None,
) -> Tensor:
    """Returns τ² · KL(teacher ‖ softmax(student / τ)), averaged over the rows of the mini-batch.

    The teacher is a constant. A class with teacher probability 0 contributes nothing. The factor τ² makes the
    gradient's size independent of τ: for large τ the loss approaches half the mean squared distance of the centred
    logits.

    Args:
        student_logits_bc: `[batch, classes]`, finite; half precision is computed in float32.
        teacher_probs_bc: `[batch, classes]`, rows on the simplex, on the student's torch device. Must be softened
            or refined already; no temperature is applied here.
        temperature: The papers' τ, finite and greater than 0.
        valid_b: `[batch]` bool, False for rows without a teacher. These rows contribute 0 but count in the
            mean, as in the methods' pseudocode.
        class_weights: Factors of the classes' terms q_c · ln(q_c / p_c), `[classes]` or `[batch, classes]`, of any
            sign; None for 1.

    Returns:
        A scalar, at least 0 up to rounding without `class_weights`; 0 for an empty batch.

    Raises:
        ConfigurationError: `temperature` is out of range.
        KnowledgeError: The shapes do not agree.

    References:
        Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation,
        eqs. (1), (2), (8); Hinton et al., Distilling the Knowledge in a Neural Network, section 2.
    """
    _check_temperature(temperature)
    _check_shapes(student_logits_bc, teacher_probs_bc, valid_b)
    if class_weights is not None and class_weights.shape not in (student_logits_bc.shape, student_logits_bc.shape[1:]):
        raise KnowledgeError(
            f"class weights have shape {list(class_weights.shape)}, expected [{student_logits_bc.shape[1]}] or that of "
            f"the logits, {list(student_logits_bc.shape)}"
        )
    log_student_bc = (_at_least_float32(student_logits_bc) / temperature).log_softmax(dim=-1)
    target_bc = teacher_probs_bc.detach().to(log_student_bc.dtype)
    if valid_b is not None:
        target_bc = torch.where(valid_b[:, None], target_bc, 0.0)  # 0 · log 0 = 0: value and gradient vanish
    if class_weights is None:
        divergence = functional.kl_div(log_student_bc, target_bc, reduction="sum")
    else:
        terms_bc = functional.kl_div(log_student_bc, target_bc, reduction="none")
        divergence = (class_weights.to(terms_bc.dtype) * terms_bc).sum()
    return temperature**2 * divergence / max(len(student_logits_bc), 1)


def feature_distance(student: Tensor, target: Tensor, *, valid_b: Tensor | None = None) -> Tensor:
    """Returns the mean squared distance of two networks' features, averaged over elements and rows.

    Args:
        student: `[batch, ...]`.
        target: The same shape, a constant.
        valid_b: `[batch]` bool, False for rows without a target; these contribute 0 and count in the mean.

    Returns:
        A scalar, at least 0; 0 for an empty batch.

    Raises:
        KnowledgeError: The shapes do not agree.
    """
    if student.shape != target.shape:
        raise KnowledgeError(
            f"student features have shape {list(student.shape)}, but their target has {list(target.shape)}; "
            "both must be features at the same cut of one architecture"
        )
    squares = (_at_least_float32(student) - _at_least_float32(target.detach())).square().flatten(1)
    if valid_b is not None:
        squares = torch.where(valid_b[:, None], squares, 0.0)
    return squares.sum() / max(squares.numel(), 1)


def js_divergence(student_logits_bc: Tensor, teacher_probs_bc: Tensor) -> Tensor:
    """Returns the Jensen-Shannon divergence of teacher and softmax(student), averaged over the mini-batch's rows.

    JS = ½ KL(t ‖ m) + ½ KL(s ‖ m) with m = ½ (t + s): symmetric, and in [0, ln 2].

    Args:
        student_logits_bc: `[batch, classes]`, finite; half precision is computed in float32.
        teacher_probs_bc: `[batch, classes]`, rows on the simplex; a constant.

    Returns:
        A scalar in nats; 0 for an empty batch.

    Raises:
        KnowledgeError: The shapes do not agree.
    """
    _check_shapes(student_logits_bc, teacher_probs_bc, None)
    log_student_bc = _at_least_float32(student_logits_bc).log_softmax(dim=-1)
    student_bc, target_bc = log_student_bc.exp(), teacher_probs_bc.detach().to(log_student_bc.dtype)
    middle_bc = (student_bc + target_bc) / 2
    log_middle_bc = middle_bc.clamp_min(torch.finfo(middle_bc.dtype).tiny).log()  # 0 · log 0 = 0
    from_student = student_bc * (log_student_bc - log_middle_bc)
    from_teacher = torch.special.xlogy(target_bc, target_bc) - target_bc * log_middle_bc
    total: Tensor = (from_student + from_teacher).sum()
    return total / 2 / max(len(student_bc), 1)


def euclidean_distance(student_bf: Tensor, teacher_bf: Tensor, *, over_batch: bool = False) -> Tensor:
    """Returns ‖teacher − student‖₂ averaged over the rows; the gradient of equal rows is 0.

    Args:
        student_bf: `[batch, numbers]`; half precision is computed in float32.
        teacher_bf: The same shape; a constant.
        over_batch: Whether to return the Frobenius norm over the mini-batch instead, which grows with its size.

    Returns:
        A scalar, at least 0; 0 for an empty batch.

    Raises:
        KnowledgeError: The shapes do not agree.
    """
    _check_shapes(student_bf, teacher_bf, None)
    difference_bf = _at_least_float32(student_bf) - _at_least_float32(teacher_bf.detach())
    norms: Tensor = torch.linalg.vector_norm(difference_bf, dim=None if over_batch else -1)
    return norms if over_batch else norms.sum() / max(len(difference_bf), 1)


def soft_cross_entropy(student_logits_bc: Tensor, teacher_probs_bc: Tensor, temperature: float) -> Tensor:
    """Returns -τ² · Σ_c p_c · ln softmax(student / τ)_c averaged over rows: `distillation_loss` plus τ² · H(teacher).

    Its gradient equals that of `distillation_loss`: τ · (softmax(student / τ) - p) for each row of a sum.

    Args:
        student_logits_bc: `[batch, classes]`, finite; half precision is computed in float32.
        teacher_probs_bc: `[batch, classes]`, rows on the simplex, already softened; a constant.
        temperature: τ, finite and greater than 0.

    Returns:
        A scalar in nats, at least 0; 0 for an empty batch.

    Raises:
        ConfigurationError: `temperature` is out of range.
        KnowledgeError: The shapes do not agree.

    References:
        Li et al., FedDKD: Federated Learning with Decentralized Knowledge Distillation, algorithm 2.
    """
    _check_temperature(temperature)
    _check_shapes(student_logits_bc, teacher_probs_bc, None)
    log_student_bc = (_at_least_float32(student_logits_bc) / temperature).log_softmax(dim=-1)
    target_bc = teacher_probs_bc.detach().to(log_student_bc.dtype)
    return -(temperature**2) * (target_bc * log_student_bc).sum() / max(len(student_logits_bc), 1)


def activation_divergence(activations_bd: Tensor, *, reverse_elementwise: bool = False) -> Tensor:
    """Returns KL(softmax(activations) ‖ U) for the uniform distribution U over d entries, averaged over rows.

    KL(softmax(a) ‖ U) = ln d - H(softmax(a)), in [0, ln d] nats.

    Args:
        activations_bd: `[batch, d]`, finite, the input of a model's last layer.
        reverse_elementwise: Whether to return KL(U ‖ softmax(a)) / d instead, as in the code of FedMAX.

    Returns:
        A scalar, at least 0 up to rounding; 0 for an empty batch.

    Raises:
        KnowledgeError: The activations are not `[batch, d]`.

    References:
        Li et al., FedDKD, algorithm 3; Chen et al., FedMAX: Mitigating Activation Divergence for Accurate and
        Communication-Efficient Federated Learning.
    """
    if activations_bd.ndim != 2:
        raise KnowledgeError(f"activations have shape {list(activations_bd.shape)}, must be [batch, numbers]")
    rows = max(len(activations_bd), 1)
    entries = activations_bd.shape[1]
    log_probs_bd = _at_least_float32(activations_bd).log_softmax(dim=-1)
    if reverse_elementwise:
        return (-math.log(entries) - log_probs_bd).sum() / entries / (rows * entries)
    return (log_probs_bd.exp() * (log_probs_bd + math.log(entries))).sum() / rows


def _at_least_float32(values: Tensor) -> Tensor:
    """Converts half precision to float32: float16 overflows at 65,504, bfloat16 has 3 digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigurationError(f"temperature is {temperature}, must be a finite number > 0")


def _check_shapes(student_bc: Tensor, teacher_bc: Tensor, valid_b: Tensor | None) -> None:
    # A teacher of shape [classes] would otherwise broadcast over the batch.
    if student_bc.ndim != 2 or student_bc.shape != teacher_bc.shape:
        raise KnowledgeError(
            f"student logits have shape {list(student_bc.shape)} and teacher probabilities {list(teacher_bc.shape)}; "
            "both must be the same [batch, classes]"
        )
    if valid_b is not None and (valid_b.shape != student_bc.shape[:1] or valid_b.dtype != torch.bool):
        raise KnowledgeError(
            f"valid_b is {valid_b.dtype} of shape {list(valid_b.shape)}, must be torch.bool of [{len(student_bc)}]"
        )
