"""Class statistics with a refined head: gradient sums of devices that drop out, join, lie or are forgotten."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats.class_statistics_fleet import Rounds
from methods.classstats.one_exchange_fleet import (
    config_of,
    device_on,
    devices,
    fleet,
    make_device,
    make_server,
    space_of,
)

from fleetdistill.errors import CannotAnswer, ConfigurationError, WireError
from fleetdistill.knowledge import ClassSpace, HeadGradient, LinearHead, Plan
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData

REFINE: dict[str, Any] = {"refine": "gradients"}


def refined_fleet(names: str = "abc", **settings: Any) -> Rounds:
    return fleet(names, **REFINE, **settings)


def steps_of(played: Rounds, device: str = "a") -> list[str]:
    return [step for step, name, _ in played.asked if name == device]


def kinds(played: Rounds) -> list[str]:
    return [kind for kind, _ in played.events]


def same(one: ClassSpace, other: ClassSpace) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


# --- a round


def test_devices_sum_gradients_between_statistics_and_space():
    played = refined_fleet().play()
    assert steps_of(played) == ["summarise", *["refine"] * 5, "learn"]
    assert space_of(played).is_refined
    assert played.figures["refined_loss"] > 0
    assert re.fullmatch(
        "the head is refined by 5 sums of the gradients of 3 devices; .* by -[0-9.]+%",
        dict(played.events)["head-refined"],
    )
    heads = [parts["head"] for step, name, parts in played.asked if (step, name) == ("refine", "a")]
    weights = {head.weights.tobytes() for head in heads if isinstance(head, LinearHead) and head.labels == [0, 1, 2, 3]}
    assert len(weights) == 5


def test_without_the_setting_nothing_changes():
    played = fleet("abc").play()
    assert steps_of(played) == ["summarise", "learn"]
    assert not space_of(played).is_refined


def test_more_steps_have_a_smaller_loss():
    losses = [refined_fleet(refine_steps=steps).play().figures["refined_loss"] for steps in (2, 5, 12)]
    assert losses[0] > losses[1] > losses[2]


def test_the_devices_have_both_variants_from_the_head():
    played = refined_fleet().play()
    for half in played.halves.values():
        assert half.own.space.is_refined
        data = half.local.data
        for name in ("general", "personal"):
            found = half.variants()[name].eval()(data.inputs).argmax(dim=1)
            assert (found == data.labels).float().mean() >= 0.9


def test_no_leave_one_out_accuracy_is_told_of_a_head():
    names = {metric.name for metric in refined_fleet().play().halves["a"].figures}
    assert names == {"own_statistics/leave_one_out", "own_statistics_kept"}


# --- devices that do not answer


def test_a_device_that_drops_out_is_not_asked_again():
    played = refined_fleet()
    played.deaf = {("refine", "c")}
    played.play()
    assert space_of(played).is_refined
    assert steps_of(played, "c") == ["summarise", "refine"]
    assert steps_of(played, "a") == ["summarise", *["refine"] * 5, "learn"]


def test_a_late_drop_out_does_not_end_the_refinement():
    """From its step on the sums are of other devices: that they hardly fall any more is no reason to stop."""
    played, asks = refined_fleet(refine_steps=12), 0
    honest = played.halves["c"].handle

    def leave_late(ask: Ask) -> Answer:
        nonlocal asks
        asks += ask.step == "refine"
        if asks > 9:
            raise CannotAnswer("gone")
        return honest(ask)

    played.halves["c"].handle = leave_late
    played.play()
    assert steps_of(played) == ["summarise", *["refine"] * 12, "learn"]
    assert space_of(played).is_refined
    assert "not-refined" not in dict(played.events)


def test_too_few_rows_leave_the_closed_form_and_try_again():
    played = refined_fleet()
    played.deaf = {("refine", "a"), ("refine", "b")}
    played.play()
    assert not space_of(played).is_refined
    text = dict(played.events)["not-refined"]
    assert "only 22 of the merge's 85 rows" in text
    played.deaf = set()
    played.play(4)  # devices that did not answer are paused
    assert played.server.state_dict()["head"] is not None
    assert all(half.own.space.is_refined for half in played.halves.values())


def test_the_closed_form_stays_where_the_loss_hardly_falls():
    """With labels that the features say nothing of; the same merge is not tried again."""
    halves = {}
    for number, (name, half) in enumerate(devices(**REFINE).items()):
        data = half.local.data
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(number))
        halves[name] = device_on(TensorData(data.inputs[:], data.labels[order]), **REFINE)
    played = Rounds(make_server(**REFINE), halves).play()
    assert steps_of(played) == ["summarise", "refine", "refine", "learn"]
    assert "changes the objective by" in dict(played.events)["not-refined"]
    assert not space_of(played).is_refined
    state = unpack_state(pack_state(played.server.state_dict()))
    played.server = make_server(**REFINE)
    played.server.load_state_dict(state)
    assert played.play().asked == []


# --- later rounds


def test_a_small_newcomer_gets_the_head_and_nobody_is_asked():
    played = refined_fleet().play()
    before = space_of(played)
    played.halves["d"] = make_device([4, 4, 0, 0], seed=5, min_samples=2, **REFINE)
    played.server.config = replace(played.server.config, min_samples=2)
    played.play()
    assert {name for _, name, _ in played.asked} == {"d"}
    assert steps_of(played, "d") == ["summarise", "learn"]
    assert same(space_of(played), before)
    plan = played.asked[-1][2]["plan"]
    assert isinstance(plan, Plan)
    assert plan.values["counted"] is False


def test_a_large_newcomer_makes_a_new_head():
    played = refined_fleet().play()
    before = space_of(played)
    played.halves["d"] = make_device([9, 9, 9, 9], seed=5, **REFINE)
    played.play()
    assert steps_of(played, "a") == [*["refine"] * 5, "learn"]
    assert not same(space_of(played), before)
    assert space_of(played).is_refined


def test_a_head_is_made_anew_without_a_forgotten_device():
    played = refined_fleet().play()
    played.server.forget("c", played)
    assert played.server.state_dict()["head"] is None
    played.away = {"c"}
    played.play()
    assert same(space_of(played), space_of(refined_fleet("ab").play()))


@pytest.mark.parametrize("change", ["newcomer", "forgotten"])
def test_a_restored_server_goes_on_as_before(change):
    def after(restores: bool) -> ClassSpace:
        played = refined_fleet().play()
        if change == "forgotten":
            played.server.forget("b", played)
            played.away = {"b"}
        else:
            played.halves["d"] = make_device([9, 9, 9, 9], seed=5, **REFINE)
        if restores:
            state = unpack_state(pack_state(played.server.state_dict()))
            played.server = make_server(**REFINE)
            played.server.load_state_dict(state)
        return space_of(played.play())

    assert same(after(restores=True), after(restores=False))


def test_a_device_that_was_started_anew_has_its_head():
    played = refined_fleet().play()
    before = played.halves["a"]
    saved = unpack_state(pack_state(before.state_dict()))
    again = devices(**REFINE)["a"]
    again.load_state_dict(saved)
    inputs = before.local.data.inputs
    for name in ("general", "personal"):
        assert (again.variants()[name].eval()(inputs) == before.variants()[name].eval()(inputs)).all()


# --- devices that lie


def test_sums_that_cannot_be_right_are_left_out():
    played = refined_fleet()
    honest = played.halves["c"].handle

    def lie(ask: Ask) -> Answer:
        answer = honest(ask)
        if ask.step != "refine":
            return answer
        sent = answer.parts["gradient"]
        assert isinstance(sent, HeadGradient)
        return replace(answer, parts={"gradient": replace(sent, gradient=np.abs(sent.gradient))})

    played.halves["c"].handle = lie
    played.play()
    assert "c: column " in dict(played.events)["gradient-left-out"]
    deaf = refined_fleet()
    deaf.deaf = {("refine", "c")}
    assert same(space_of(played), space_of(deaf.play()))


HEAD = LinearHead(
    labels=[0, 1], counts=np.array([5, 5]), mean=np.zeros(64, np.float16), weights=np.zeros((2, 65), np.float16)
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": [0]}, "shapes"),
        ({"labels": [0, 0]}, "expected different ones in"),
        ({"labels": [0, 7]}, "expected different ones in"),
        ({"weights": np.zeros((2, 64), np.float16)}, "shapes"),
        ({"mean": np.zeros(63, np.float16)}, "shapes"),
        ({"counts": np.array([5])}, "shapes"),
        ({"weights": np.full((2, 65), np.inf, np.float16)}, "not finite"),
        ({"mean": np.full(64, np.nan, np.float16)}, "not finite"),
    ],
)
def test_a_device_refuses_heads_that_do_not_fit(changes, says):
    half = make_device([9, 9, 0, 0], dimensions=64, **REFINE)
    ask = Ask(round=1, step="refine", seed=0, parts={"head": replace(HEAD, **changes), "plan": Plan(values={})})
    with pytest.raises(WireError, match=says):
        half.handle(ask)


@pytest.mark.parametrize(
    ("left_out", "error", "says"),
    [([0, 1], CannotAnswer, "no row of this device is in the merge"), ("all", WireError, "left_out is 'all'")],
)
def test_a_device_without_rows_in_the_merge_declines(left_out, error, says):
    half = make_device([9, 9, 0, 0], dimensions=64, **REFINE)
    plan = Plan(values={"left_out": left_out})
    with pytest.raises(error, match=says):
        half.handle(Ask(round=1, step="refine", seed=0, parts={"head": HEAD, "plan": plan}))


def test_a_device_sums_nothing_in_a_run_without_a_head():
    half = make_device([9, 9, 0, 0], dimensions=64)
    with pytest.raises(WireError, match="the run has no refined head"):
        half.handle(Ask(round=1, step="refine", seed=0, parts={"head": HEAD, "plan": Plan(values={})}))


# --- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"refine": "always"}, "unknown refine 'always'"),
        ({"refine_steps": 1}, "refine_steps"),
        ({"refine_steps": 21}, "refine_steps"),
        ({**REFINE, "predictor": "trained"}, "needs predictor = 'closed_form'"),
        ({**REFINE, "own_network": "taught"}, "own_network = 'kept'"),
        ({**REFINE, "participation_ratio": 0.5}, "participation_ratio must be 1"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        config_of(**settings)


def test_a_run_with_a_head_needs_consent_to_gradients():
    assert set(make_server(**REFINE).requirements().columns) == {"class_statistics", "counts", "gradients"}
    assert set(make_server().requirements().columns) == {"class_statistics", "counts"}
