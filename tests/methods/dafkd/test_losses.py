"""The losses of generator, discriminator and student."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fleetdistill.methods.dafkd.training import adversarial_loss, generator_loss, gradient_penalty
from fleetdistill.models import build_generator
from fleetdistill.training.losses import distillation_loss
from fleetdistill_server.methods.dafkd.ensemble import (
    ensemble,
    importance_weights,
)


@pytest.mark.parametrize(("kind", "slope"), [("minimax", -0.017986), ("nonsaturating", -0.982014)])
def test_daf_7_the_generators_gradient(kind: str, slope: float) -> None:
    verdict = torch.tensor([-4.0], requires_grad=True)
    generator_loss(verdict, kind).backward()
    assert verdict.grad is not None
    assert verdict.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", ["minimax", "nonsaturating"])
def test_daf_7_generator_step_raises_discriminator_verdict(kind: str) -> None:
    torch.manual_seed(0)
    generator, noise = build_generator("digits_generator"), torch.randn(32, 100)
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    before = float(judge(generator(noise)).detach().sigmoid().mean())
    generator_loss(judge(generator(noise))[:, 0], kind).backward(inputs=list(generator.parameters()))
    torch.optim.SGD(generator.parameters(), lr=0.01).step()
    assert float(judge(generator(noise)).detach().sigmoid().mean()) > before
    assert all(parameter.grad is None for parameter in judge.parameters())


def test_daf_8_adversarial_loss_is_mean_over_real_and_generated() -> None:
    real, fake = torch.tensor([2.0, 1.0]), torch.tensor([-1.0, 0.0])
    assert float(adversarial_loss(real, fake)) == pytest.approx(0.361650, abs=1e-6)
    sum_of_means = adversarial_loss(real, torch.empty(0)) + adversarial_loss(torch.empty(0), fake)
    assert float(sum_of_means) == pytest.approx(0.723299, abs=1e-6)


def test_daf_9_generator_optimum_is_not_mean_of_devices() -> None:
    """Two devices over two points; with best discriminators the sum of ln 2 - L_adv is the sum of Jensen-Shannon."""

    def objective(first: int) -> float:
        fake = torch.tensor([first, 10_000 - first])
        total = 0.0
        for real in (torch.tensor([9_000, 1_000]), torch.tensor([2_000, 8_000])):
            best = (real.double() / fake).log()  # logit of p / (p + q)
            total += np.log(2) - float(adversarial_loss(best.repeat_interleave(real), best.repeat_interleave(fake)))
        return total

    result = min(range(5_600, 5_740), key=objective)
    assert result == 5_666
    assert objective(5_666) == pytest.approx(0.14861310, abs=1e-8)
    assert objective(5_500) == pytest.approx(0.14885051, abs=1e-8)


def test_daf_10_the_best_discriminator_is_p_over_p_plus_q() -> None:
    real, fake = torch.tensor([6, 1]), torch.tensor([3, 3])
    best = torch.tensor([2 / 3, 0.25], dtype=torch.float64)
    logits = best.logit().requires_grad_()
    adversarial_loss(logits.repeat_interleave(real), logits.repeat_interleave(fake)).backward()
    assert logits.grad is not None
    assert_close(logits.grad, torch.zeros(2).double(), atol=1e-15, rtol=0)


def test_the_gradient_penalty_of_a_line_is_known() -> None:
    """f = sigmoid(3 x1 + 4 x2) has the slope 5 f (1 - f); at x = 0 that is 1.25, the penalty 0.0625."""
    weights = torch.tensor([3.0, 4.0])
    zeros = torch.zeros(2, 1, 2, 1)
    penalty = gradient_penalty(lambda x: x.flatten(1) @ weights, zeros, zeros, torch.tensor([0.2, 0.9]))
    assert penalty.detach().item() == pytest.approx(0.0625)


def test_daf_property_student_equal_to_teacher_learns_nothing() -> None:
    logits = torch.randn(6, 4, dtype=torch.float64)
    teacher = ensemble(importance_weights(torch.randn(1, 6)), logits[None], 2.0, "probs")
    student = logits.clone().requires_grad_()
    loss = distillation_loss(student, teacher, 2.0)
    loss.backward()
    assert abs(loss.detach().item()) < 1e-12
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-12
