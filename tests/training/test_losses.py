"""The losses both halves share: the specification's oracle, hand-worked values, laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.training.losses import distillation_loss, soft_targets


def _pair(seed: int, batch: int, classes: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Student logits and teacher logits, float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(batch, classes, dtype=torch.float64, generator=generator) for _ in range(2))
    return scale * student, scale * teacher


def test_dkc_19_server_loss() -> None:
    logits, target = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.5, 0.272727, 0.227273]])
    cross_entropy = functional.cross_entropy(logits, torch.tensor([0]))
    divergence = distillation_loss(logits, target, 1.0)
    assert float(cross_entropy) == pytest.approx(0.407606, abs=1e-6)
    assert float(divergence) == pytest.approx(0.097227, abs=1e-6)
    assert float(cross_entropy + 1.5 * divergence) == pytest.approx(0.553446, abs=1e-6)


def test_a_one_hot_teacher_gives_cross_entropy() -> None:
    """0 · log 0 counts as 0: KL(one-hot ‖ uniform over 2) = 1 · log(1 / 0.5) = log 2."""
    teacher = torch.tensor([[1.0, 0.0]])
    assert float(distillation_loss(torch.zeros(1, 2), teacher, 1.0)) == pytest.approx(math.log(2))


def test_rows_are_averaged_and_scaled_by_the_squared_temperature() -> None:
    """Uniform students, one one-hot teacher row and one uniform: τ² · (log 2 + 0) / 2 at any τ."""
    teacher = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert float(distillation_loss(torch.zeros(2, 2), teacher, 3.0)) == pytest.approx(9 * math.log(2) / 2)


def test_soft_targets_divide_by_the_temperature() -> None:
    """Odds of e^(2/2) : 1 from logits 2 and 0 at τ = 2."""
    assert_close(soft_targets(torch.tensor([[2.0, 0.0]]), 2.0), torch.tensor([[math.e, 1.0]]) / (math.e + 1))


@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 6), classes=st.integers(2, 20), tau=st.floats(0.2, 20))
@settings(max_examples=60)
def test_loss_is_positive_and_zero_only_for_equal_distributions(
    seed: int, batch: int, classes: int, tau: float
) -> None:
    student, teacher = _pair(seed, batch, classes)
    assert float(distillation_loss(student, soft_targets(teacher, tau), tau)) > 0
    shifted = teacher + torch.arange(batch)[:, None]  # the same distributions, other logits
    assert abs(float(distillation_loss(shifted, soft_targets(teacher, tau), tau))) < 1e-9


@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 6), classes=st.integers(2, 20), tau=st.floats(0.2, 20))
@settings(max_examples=60)
def test_the_gradient_is_the_difference_of_the_probabilities(seed: int, batch: int, classes: int, tau: float) -> None:
    """d/dz of τ² KL = τ (softmax(z / τ) - teacher) / batch; none reaches the teacher."""
    student, teacher = _pair(seed, batch, classes)
    student.requires_grad_()
    probs = soft_targets(teacher, tau).requires_grad_()
    distillation_loss(student, probs, tau).backward()
    assert student.grad is not None
    assert_close(student.grad, tau * (soft_targets(student, tau) - probs.detach()) / batch)
    assert probs.grad is None


@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(2, 20))
@settings(max_examples=40)
def test_a_large_temperature_matches_centred_logits(seed: int, classes: int) -> None:
    """Hinton et al., section 2.1: the limit is |a - b|² / (2 C) of the centred logits."""
    student, teacher = _pair(seed, 3, classes)
    gap = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    limit = gap.square().sum(dim=1).mean() / (2 * classes)
    assert_close(distillation_loss(student, soft_targets(teacher, 1e4), 1e4), limit, rtol=1e-3, atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), mask=st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=40)
def test_rows_without_knowledge_add_nothing_but_count_in_mean(seed: int, mask: list[bool]) -> None:
    student, teacher = _pair(seed, len(mask), 4)
    valid, probs = torch.tensor(mask), soft_targets(teacher, 2.0)
    by_row = torch.stack([distillation_loss(student[i : i + 1], probs[i : i + 1], 2.0) for i in range(len(mask))])
    garbage = torch.where(valid[:, None], probs, torch.nan)
    student.requires_grad_()
    loss = distillation_loss(student, garbage, 2.0, valid_b=valid)
    loss.backward()
    assert_close(loss.detach(), by_row[valid].sum() / len(mask))
    assert student.grad is not None
    assert not student.grad[~valid].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    student = torch.tensor([[6e4, -6e4, 0.0]], dtype=dtype, requires_grad=True)
    loss = distillation_loss(student, soft_targets(-student, 0.5), 0.5)
    loss.backward()
    assert loss.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert float(loss.detach()) == pytest.approx(0.5 * 1.2e5, rel=1e-2)  # τ² · (6e4 - -6e4) / τ


def test_an_empty_batch_has_no_loss() -> None:
    assert float(distillation_loss(torch.zeros(0, 3), torch.zeros(0, 3), 1.0)) == 0.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigurationError, match=f"temperature is {temperature}"):
        soft_targets(torch.zeros(1, 2), temperature)
    with pytest.raises(ConfigurationError, match="temperature"):
        distillation_loss(torch.zeros(1, 2), torch.zeros(1, 2), temperature)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(KnowledgeError, match=r"\[4, 3\] and teacher probabilities \[3\]"):
        distillation_loss(torch.zeros(4, 3), torch.full((3,), 1 / 3), 1.0)
    with pytest.raises(KnowledgeError, match="valid_b"):
        distillation_loss(torch.zeros(4, 3), torch.zeros(4, 3), 1.0, valid_b=torch.ones(4))
