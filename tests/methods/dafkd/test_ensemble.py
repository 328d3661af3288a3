"""Importance, the ensemble of the devices, and when a generator is mature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.dafkd.dafkd_fleet import CPU, QUICK, SHAPE
from torch.testing import assert_close

from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.training import weighted_predictions
from fleetdistill.training.losses import distillation_loss
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.dafkd.ensemble import (
    classes_needed,
    effective_devices,
    ensemble,
    ensemble_of_weighted,
    equal_weights,
    importance_weights,
)
from fleetdistill_server.methods.dafkd.server import DaFKDServer
from fleetdistill_server.testing import FakeCohort

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)

VERDICTS = torch.tensor([[2.0], [0.0], [-1.0]], dtype=torch.float64)


def test_daf_1_importance_is_the_discriminators_share() -> None:
    assert_close(VERDICTS.sigmoid()[:, 0], torch.tensor([0.880797, 0.5, 0.268941]).double(), atol=1e-6, rtol=0)
    weights = importance_weights(VERDICTS)
    assert_close(weights[:, 0], torch.tensor([0.533901, 0.303078, 0.163021]).double(), atol=1e-6, rtol=0)
    assert_close(weights.sum(0), torch.ones(1).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_daf_2_importance_of_hopeless_samples_is_finite(dtype: torch.dtype) -> None:
    """The quotient of eq. (7) is 0 / 0 in both types; its share in exact numbers is 1 : e^-100 : e^-200."""
    verdicts = torch.tensor([[-800.0], [-900.0], [-1000.0]], dtype=dtype)
    naive = verdicts.sigmoid() / verdicts.sigmoid().sum(0)
    assert bool(naive.isnan().all())
    weights = importance_weights(verdicts)[:, 0]
    assert weights[0] == 1
    assert_close(weights[1:].log(), torch.tensor([-100.0, -200.0]).double(), atol=1e-9, rtol=0)


@given(logit=st.floats(-50, 50), devices=st.integers(1, 9))
def test_daf_3_equal_discriminators_count_alike(logit: float, devices: int) -> None:
    weights = importance_weights(torch.full((devices, 2), logit))
    assert_close(weights, torch.full((devices, 2), 1 / devices).double())
    assert_close(weights, equal_weights(devices, 2))


def test_daf_13_without_correlation_eight_devices_weigh_equally() -> None:
    assert equal_weights(8, 1)[:, 0].tolist() == [0.125] * 8


def test_daf_4_the_teacher_is_the_weighted_mean() -> None:
    logits = PROBS.log()[:, None]
    teacher = ensemble(importance_weights(VERDICTS), logits, 1.0, "probs")
    assert_close(teacher[0], torch.tensor([0.452945, 0.398149, 0.148906]).double(), atol=1e-6, rtol=0)
    uniform = torch.zeros(1, 3, dtype=torch.float64)
    assert float(distillation_loss(uniform, teacher, 1.0)) == pytest.approx(0.089637, abs=1e-6)
    plain = ensemble(equal_weights(3, 1), logits, 1.0, "probs")
    assert_close(plain[0], torch.tensor([0.366667, 0.433333, 0.2]).double(), atol=1e-6, rtol=0)
    assert float(distillation_loss(uniform, plain, 1.0)) == pytest.approx(0.046473, abs=1e-6)


def test_daf_5_sum_of_weighted_predictions_is_same_teacher() -> None:
    weighted = [weighted_predictions(VERDICTS[k], PROBS[k : k + 1]) for k in range(3)]
    for k in range(3):
        assert_close(weighted[k].sum(1), VERDICTS[k].sigmoid(), atol=1e-12, rtol=0)
    teacher, usable = ensemble_of_weighted(torch.stack(weighted).sum(0))
    expected = ensemble(importance_weights(VERDICTS), PROBS.log()[:, None], 1.0, "probs")
    assert_close(teacher, expected, atol=1e-12, rtol=0)
    assert usable.tolist() == [True]


def test_daf_6_averaging_probabilities_and_logits_differ() -> None:
    logits = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    half = equal_weights(2, 1)
    expected = {
        ("probs", 1.0): [0.588302, 0.296893, 0.114805],
        ("logits", 1.0): [0.736125, 0.164252, 0.099624],
        ("logits", 20.0): [0.353035, 0.327526, 0.319439],
    }
    for (space, temperature), row in expected.items():
        teacher = ensemble(half, logits, temperature, space)
        assert_close(teacher[0], torch.tensor(row).double(), atol=1e-6, rtol=0)


def test_vanished_importance_drops_a_sample_and_keeps_the_others() -> None:
    sums = torch.tensor([[0.2, 0.6], [0.0, 0.0], [1e-40, 0.0]], dtype=torch.float64)
    teacher, usable = ensemble_of_weighted(sums)
    assert usable.tolist() == [True, False, False]
    assert_close(teacher[0], torch.tensor([0.25, 0.75]).double())
    assert bool(teacher.isfinite().all())


def test_weighted_predictions_have_floor_so_float32_keeps_them() -> None:
    weighted = weighted_predictions(torch.tensor([-500.0]), torch.tensor([[0.5, 0.5]]))
    assert weighted.float().sum().item() == pytest.approx(1e-12)
    assert_close(weighted_predictions(None, PROBS), PROBS)


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 6), samples=st.integers(1, 5))
def test_effective_devices_lie_between_one_and_all(seed: int, devices: int, samples: int) -> None:
    verdicts = 5 * torch.randn(devices, samples, generator=torch.Generator().manual_seed(seed))
    assert 1 - 1e-9 <= effective_devices(importance_weights(verdicts)) <= devices + 1e-9
    assert effective_devices(equal_weights(devices, samples)) == pytest.approx(devices)


@pytest.mark.parametrize(("classes", "seen", "mature"), [(10, 5, True), (10, 4, False), (3, 2, True), (3, 1, False)])
def test_with_few_classes_half_of_them_must_be_seen(classes: int, seen: int, mature: bool) -> None:
    assert (seen >= classes_needed(torch.eye(classes)[torch.arange(20) % seen])) is mature


def test_with_many_classes_half_of_those_in_view_must_be_seen() -> None:
    """104 classes: 20 in view, each with 0.05 - 84 * 0.0005 / 20 on average, need 10; two need five all the same."""
    spread = torch.full((1280, 104), 0.0005, dtype=torch.float64)
    spread[:, :20] = (1 - 84 * 0.0005) / 20
    assert classes_needed(spread) == 10
    sure = torch.eye(104, dtype=torch.float64)
    assert classes_needed(sure[torch.arange(1280) % 2]) == 5
    assert classes_needed(sure[torch.arange(1040) % 104]) == 52
    assert classes_needed(torch.empty(0, 104)) == 52


def test_guard_opens_at_104_classes_if_visible_ones_are_covered() -> None:
    """17 best classes of 34 in view, as measured in round 5 of a fleet with 104 classes; half of all would be 52."""
    context = MethodContext(
        classes=104, input_shape=SHAPE, models=ModelSection(device="digits_mlp_small"), torch_device=CPU, seed=3
    )
    server = DaFKDServer(DaFKDConfig.from_settings(QUICK).for_classes(104), context)
    teacher = torch.full((340, 104), 0.1 / 70, dtype=torch.float64)
    teacher[:, :34] = 0.9 / 34
    teacher[torch.arange(340), torch.arange(340) % 17] += 0.001
    teacher /= teacher.sum(1, keepdim=True)
    cohort = FakeCohort({})
    assert server.if_mature((torch.rand(340, *SHAPE), teacher), cohort)
    teacher[:, 0] += 0.01  # one class is the best of every sample
    assert not server.if_mature((torch.rand(340, *SHAPE), teacher), cohort)
    assert cohort.events[0].kind == "maturity-guard"
