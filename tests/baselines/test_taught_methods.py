"""Baselines whose devices distil a frozen model: the loss by hand, its limits, and which model teaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines.bed import make_config, make_device, make_fleet, make_rows
from baselines.personal_bed import assert_equal, state_of
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.testing import play

TAUGHT = ("pfedsd",)


class Fixed(nn.Module):
    """Logits that do not depend on the input."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([logits], dtype=torch.float64))
        self.extractor = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return x

    def predict(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)


def loss_of(
    method: str, student: tuple[float, ...], teacher: tuple[float, ...], **settings: Any
) -> tuple[float, list[float]]:
    """Returns the loss of a row of class 0, and its gradient by the student's logits."""
    own = Fixed(*student)
    device = make_device(method, own, make_rows(0, classes=len(student)), classes=len(student), beta=1.0, **settings)
    device.teacher = Fixed(*teacher)
    loss = device.loss(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    loss.backward()
    assert own.logits.grad is not None
    return loss.item(), own.logits.grad[0].tolist()


@pytest.mark.parametrize(
    ("method", "student", "teacher", "expected"),
    [
        ("pfedsd", (2.0, 0.0, 0.0), (0.0, 2.0, 0.0), 1.600503),  # cross-entropy 0.239545 + 1.360958
        ("pfedsd", (2.0, 0.0, 0.0), (2.0, 0.0, 0.0), 0.239545),
    ],
)
def test_loss_by_hand(method: str, student: tuple[float, ...], teacher: tuple[float, ...], expected: float) -> None:
    assert loss_of(method, student, teacher)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("method", TAUGHT)
def test_equal_teacher_has_the_gradient_of_cross_entropy(method: str) -> None:
    """The gradient is softmax - (1, 0, 0)."""
    gradient = loss_of(method, (2.0, 1.0, 0.0), (2.0, 1.0, 0.0))[1]
    expected = torch.tensor([2.0, 1.0, 0.0]).double().softmax(0) - torch.tensor([1.0, 0.0, 0.0])
    assert gradient == pytest.approx(expected.tolist(), abs=1e-7)


def test_temperature_scales_the_distillation_loss() -> None:
    """4 KL(softmax(t / 2) || softmax(s / 2)) of the logits (0, 2, 0) and (2, 0, 0), by their two probabilities."""
    high, low = (float(p) for p in torch.tensor([1.0, 0.0, 0.0]).softmax(0)[:2])
    expected = 0.239545 + 4 * (high - low) * 1.0  # ln(high / low) is 1
    assert loss_of("pfedsd", (2.0, 0.0, 0.0), (0.0, 2.0, 0.0), temperature=2.0)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("method", TAUGHT)
@pytest.mark.parametrize("settings", [{"beta": -0.1}, {"temperature": 0.0}])
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        make_config(method, **settings)


@pytest.mark.parametrize("method", TAUGHT)
def test_without_its_term_it_is_fedavg(method: str) -> None:
    assert_equal(end_of("fedavg", 3), end_of(method, 3, beta=0.0))


def end_of(method: str, rounds: int, **settings: Any) -> dict[str, Tensor]:
    """Returns the global model after some rounds of two devices."""
    server, members = make_fleet(method, weighting="samples", **{"local_epochs": 3, **settings})
    play(server, members, rounds=rounds)
    return state_of(server.model)
