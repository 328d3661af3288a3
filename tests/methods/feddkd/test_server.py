"""FedDKD's server half: a round, and the guard of its steps."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.feddkd.feddkd_fleet import (
    CLASSES,
    answers,
    asked,
    assert_same,
    fleet_of,
    make_device,
    make_fleet,
    make_server,
    run_round,
    scalar_server,
    scripted,
    sent,
    state_of,
    weight_of,
)

from fleetdistill.errors import (
    QuorumNotReached,
)
from fleetdistill.knowledge import ModelParameters
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.parameters import load_parameters
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.feddkd import Gradients, limit
from fleetdistill_server.testing import FakeCohort


def mean_of(fleet: FakeCohort) -> ModelParameters:
    """What the server starts the distillation from: the mean of the models that were sent, of equal weights."""
    mean = WeightedMean("gross")
    for device, parts in answers(fleet)[0].items():
        mean.add(device, parts["parameters"], 20)  # type: ignore[arg-type]
    return mean.result(fleet)


# --- a round


def test_round_is_one_training_and_j_steps_for_answering_devices() -> None:
    server, fleet = make_server(dkd_steps=2), make_fleet(3, dkd_steps=2)
    fleet.silent = frozenset({(2, "d1")})  # type: ignore[assignment]
    run_round(server, fleet)
    everyone = ("d0", "d1", "d2")
    assert asked(fleet) == [("train", everyone), ("distil", everyone), ("distil", everyone)]
    assert [sorted(answer) for answer in answers(fleet)] == [["d0", "d1", "d2"], ["d0", "d2"], ["d0", "d1", "d2"]]
    assert fleet.figures["distillation_steps"] == 2
    assert fleet.events == []


def test_each_step_sends_the_model_of_the_step_before() -> None:
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": scripted(2, 1)}))
    weights = [float(item["parameters"].parameters["weight"][0, 0]) for item in sent(fleet)[1:]]  # type: ignore[attr-defined]
    assert weights == pytest.approx([2.0, 1.9, 1.8])
    assert weight_of(server) == pytest.approx(1.7)


def test_distillation_reduces_teacher_distance_left_by_averaging() -> None:
    losses = {}
    for steps in (0, 20):
        devices = {f"d{i}": make_device(i, local_epochs=20) for i in range(3)}
        server = make_server(local_epochs=20, dkd_steps=steps)
        run_round(server, fleet_of({name: device.handle for name, device in devices.items()}))
        losses[steps] = 0.0
        for device in devices.values():
            teacher_bc = soft_targets(device.teacher_logits(), 1.0)
            server.model.eval()
            with torch.no_grad():
                losses[steps] += float(distillation_loss(server.model(device.local.data.inputs), teacher_bc, 1.0))
    assert losses[20] < 0.9 * losses[0]


@pytest.mark.parametrize("settings", [{"dkd_steps": 0}, {"dkd_start_round": 2}])
def test_without_steps_or_before_the_start_round_it_is_fedavg(settings: dict[str, Any]) -> None:
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    run_round(server, fleet)
    assert [step for step, _ in asked(fleet)] == ["train"]
    for name, array in mean_of(fleet).parameters.items():
        np.testing.assert_array_equal(server.model.state_dict()[name].numpy(), array)


def test_the_start_round_counts_completed_rounds() -> None:
    for completed, steps in ((0, 0), (1, 0), (2, 3), (3, 3)):
        fleet = run_round(scalar_server(dkd_start_round=3), fleet_of({"a": scripted()}, completed))
        assert fleet.figures["distillation_steps"] == steps


def test_a_step_without_quorum_keeps_the_last_model() -> None:
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    members = {name: scripted(0, 1) for name in "abc"}
    fleet = run_round(server, fleet_of(members, silent=frozenset({(3, "a"), (3, "b")})))
    assert [step for step, _ in asked(fleet)] == ["train", "distil", "distil"]
    assert weight_of(server) == pytest.approx(-0.1)
    assert fleet.kinds == ["distillation-stopped"]
    assert fleet.figures["distillation_steps"] == 1


def test_training_without_quorum_closes_the_round() -> None:
    with pytest.raises(QuorumNotReached):
        run_round(scalar_server(), fleet_of({"a": scripted(), "b": scripted()}, silent=frozenset({(1, "a")})))


@given(gradients=st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=6), gone=st.integers(0, 5))
def test_a_missing_reply_leaves_the_mean_of_the_others(gradients: list[float], gone: int) -> None:
    gone %= len(gradients)
    server = scalar_server(dkd_steps=1, dkd_lr=0.1, robust="off")
    fleet = fleet_of({f"d{i}": scripted(0, value) for i, value in enumerate(gradients)})
    fleet.silent = frozenset({(2, f"d{gone}")})  # type: ignore[assignment]
    run_round(server, fleet)
    others = [value for number, value in enumerate(gradients) if number != gone]
    assert weight_of(server) == pytest.approx(-0.1 * sum(others) / len(others), abs=1e-5)


# --- the guard


def test_guard_undoes_step_that_raised_loss_and_ends_steps() -> None:
    server = scalar_server(dkd_steps=5, dkd_lr=0.1, divergence_factor=1.5)
    fleet = run_round(server, fleet_of({name: scripted(0, 1, losses=[1.0, 0.9, 1.4, 9, 9]) for name in "ab"}))
    assert weight_of(server) == pytest.approx(-0.1)  # the second of two steps is undone: 1.4 > 1.5 * 0.9
    assert [step for step, _ in asked(fleet)] == ["train", "distil", "distil", "distil"]
    assert fleet.kinds == ["divergence-guard"]
    assert "distillation step 2" in fleet.events[0][2]
    assert "the distillation rate is too large" in fleet.events[0][2]
    assert fleet.figures["distillation_steps"] == 1


def test_the_guard_stays_still_while_the_loss_does_not_rise_much() -> None:
    server = scalar_server(dkd_steps=4, dkd_lr=0.1, divergence_factor=1.5)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1, losses=[1.0, 1.4, 2.0, 0.1])}))
    assert weight_of(server) == pytest.approx(-0.4)
    assert fleet.events == []


def test_the_guard_compares_the_devices_that_answered_both_steps() -> None:
    """The device with the small loss disappears: the mean rises, but no device's loss does."""
    small, large = scripted(0, 1, losses=[0.01, 0.01]), scripted(0, 1, losses=[3.0, 3.0])
    fleet = fleet_of({"a": small, "b": large, "c": small}, silent=frozenset({(3, "a")}))
    run_round(scalar_server(dkd_steps=2), fleet)
    assert fleet.events == []


def test_a_rate_that_is_far_too_large_is_caught_on_real_models() -> None:
    settings: dict[str, Any] = {"dkd_steps": 5, "dkd_lr": 300.0, "local_epochs": 10}
    server, fleet = make_server(**settings), make_fleet(3, **settings)
    run_round(server, fleet)
    assert fleet.kinds == ["divergence-guard"]
    np.testing.assert_array_equal(
        server.model.state_dict()["stages.head.weight"], mean_of(fleet).parameters["stages.head.weight"]
    )
    unguarded, fleet = make_server(**settings, paper=True), make_fleet(3, **settings)
    run_round(unguarded, fleet)
    assert fleet.events == []
    assert fleet.figures["distillation_steps"] == 5
    assert fleet.figures["distillation_loss"]["5"] > 2 * fleet.figures["distillation_loss"]["1"]


@pytest.mark.parametrize("model", ["tiny_model", "norm_model"])
def test_the_guard_stays_still_at_the_default_rate(model: str) -> None:
    path = f"methods.feddkd.feddkd_fleet:{model}"
    server, fleet = make_server(path, dkd_steps=8), make_fleet(3, model=path, dkd_steps=8)
    run_round(server, fleet)
    assert fleet.events == []
    assert fleet.figures["distillation_steps"] == 8


@pytest.mark.parametrize("guard", [True, False])
def test_a_model_that_has_left_the_numbers_is_stepped_back_from(guard: bool) -> None:
    settings: dict[str, Any] = {"dkd_steps": 3, "dkd_lr": 1e30, "divergence_guard": guard}
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    run_round(server, fleet)
    left_out = ["gradient-left-out", "gradient-left-out"]
    assert fleet.kinds == [*left_out, "divergence-guard" if guard else "distillation-undone"]
    assert fleet.figures["distillation_steps"] == 0
    mean = make_server(**settings)
    load_parameters(mean.model, mean_of(fleet))
    assert_same(state_of(server.model), state_of(mean.model))
    json.dumps(fleet.figures, allow_nan=False)


@pytest.mark.parametrize("guard", [True, False])
def test_last_step_is_also_undone_if_weights_are_not_finite(guard: bool) -> None:
    server = scalar_server(dkd_steps=2, dkd_lr=1e38, divergence_guard=guard, dkd_lr_step_decay=0.5)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1), "b": scripted(0, 1)}))
    assert weight_of(server) == pytest.approx(-1.5e38)
    assert (fleet.kinds, fleet.figures["distillation_steps"]) == ([], 2)
    server = scalar_server(dkd_steps=2, dkd_lr=2e38, divergence_guard=guard, dkd_lr_step_decay=1.0)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1), "b": scripted(0, 1)}))
    assert weight_of(server) == pytest.approx(-2e38)
    assert (fleet.kinds, fleet.figures["distillation_steps"]) == (["distillation-undone"], 1)
    assert re.fullmatch(
        r"distillation step 2 is rolled back: \w+ is not finite after training; "
        r"this step's dkd_lr = 2e\+38 is probably too large; lower it or set dkd_max_norm",
        fleet.events[0][2],
    )


@given(
    before=st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6)),
    now=st.dictionaries(st.sampled_from("abc"), st.floats(0, math.inf)),
)
def test_a_step_never_hides_that_a_loss_became_infinite(before: dict[str, float], now: dict[str, float]) -> None:
    rise = Gradients(WeightedMean("off"), now).rise_since(Gradients(WeightedMean("off"), before))
    both = before.keys() & now.keys()
    assert not math.isnan(rise)
    if any(math.isinf(now[device]) for device in both):
        assert rise == math.inf
    elif not any(now[device] for device in both):
        assert rise == 0


def test_losses_of_zero_that_become_infinite_undo_the_step() -> None:
    lost = scripted(0, 1, losses=[0.0, math.inf])
    fleet = run_round(
        scalar_server(dkd_steps=2, dkd_lr=0.1), fleet_of({"a": lost, "b": scripted(0, 1, losses=[0.0, 0.0])})
    )
    assert fleet.kinds == ["gradient-left-out", "divergence-guard"]
    assert fleet.figures["distillation_steps"] == 0


def test_non_finite_loss_excludes_gradient_from_mean_and_figures() -> None:
    odd, even = scripted(0, 5, losses=[math.inf]), scripted(0, 1, losses=[1.0])
    server = scalar_server(dkd_steps=1, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": odd, "b": even, "c": even}))
    assert weight_of(server) == pytest.approx(-0.1)
    assert [(kind, device) for kind, device, _ in fleet.events] == [("gradient-left-out", "a")]
    assert fleet.figures["distillation_loss"] == {"1": 1.0}


@given(finite=st.integers(0, 9), count=st.integers(1, 9))
def test_finite_gradients_short_of_the_quorum_move_nothing(finite: int, count: int) -> None:
    finite = min(finite, count)
    bad, good = scripted(0, 1, losses=[math.inf]), scripted(0, 1, losses=[1.0])
    members = {f"d{number}": good if number < finite else bad for number in range(count)}
    server = scalar_server(dkd_steps=1, dkd_lr=0.1)
    fleet = run_round(server, fleet_of(members))
    enough = finite * 3 >= 2 * count
    assert weight_of(server) == pytest.approx(-0.1 if enough else 0.0)
    assert ("distillation-stopped" in fleet.kinds) != enough
    assert fleet.figures["distillation_steps"] == int(enough)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_device_never_with_finite_loss_does_not_disable_guard(odd: float) -> None:
    never, risen = scripted(0, 9, losses=[odd] * 3), scripted(0, 1, losses=[1.0, 9.0, 9.0])
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": never, "b": risen, "c": risen}))
    assert weight_of(server) == 0.0
    assert fleet.kinds == ["gradient-left-out", "gradient-left-out", "divergence-guard"]
    calm = run_round(scalar_server(dkd_steps=3), fleet_of({"a": never, "b": scripted(), "c": scripted()}))
    assert (set(calm.kinds), calm.figures["distillation_steps"]) == ({"gradient-left-out"}, 3)


def test_a_loss_that_becomes_infinite_is_a_rise() -> None:
    lost = scripted(0, 1, losses=[1.0, math.inf])
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": lost, "b": scripted(0, 1), "c": scripted(0, 1)}))
    assert weight_of(server) == 0.0
    assert fleet.kinds == ["gradient-left-out", "divergence-guard"]


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), longest=st.floats(1e-3, 1e3))
def test_the_limit_shortens_and_never_turns_a_gradient(values: list[float], longest: float) -> None:
    whole = {"a": np.array(values[:1], np.float32), "b": np.array(values[1:], np.float32)}
    norm = math.sqrt(sum(value**2 for value in values))
    short = limit(whole, longest)
    joined = np.concatenate([short["a"], short["b"]]).astype(np.float64)
    assert np.linalg.norm(joined) <= max(min(norm, longest) * (1 + 1e-5), 1e-30)
    if norm > 1e-20:
        np.testing.assert_allclose(joined, np.array(values) * min(1, longest / norm), rtol=1e-5, atol=1e-6)
    assert limit(whole, None) is whole


def test_the_limit_on_the_norm_bounds_the_step() -> None:
    server = scalar_server(dkd_steps=1, dkd_lr=0.1, dkd_max_norm=1.0)
    run_round(server, fleet_of({"a": scripted(0, 10)}))
    assert weight_of(server) == pytest.approx(-0.1 / math.sqrt(CLASSES), abs=1e-6)
