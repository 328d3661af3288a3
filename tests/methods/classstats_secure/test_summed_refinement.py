"""A refined head of secure sums: its gradients are summed over exactly the devices of the sums, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats_secure.sum_fleet import SUMMED, accuracy, devices, images, make_server, members_of

from fleetdistill.knowledge import HeadGradient, SecureMessage
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, UNMASK
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill_server.testing import FakeCohort, play

STEPS = 5
REFINE: dict[str, Any] = {"refine": "gradients"}
FIRST = 5
"""Number of the first refining step in a round; four steps of the sum are before it."""


def summed(names: str = "abcde", **settings: Any) -> Any:
    return devices(names, method=SUMMED, **{**REFINE, **settings})


def server_of(**settings: Any) -> Any:
    return make_server(SUMMED, **{**REFINE, **settings})


def steps_of(cohort: FakeCohort, device: str = "a") -> list[str]:
    return [item.step for item in cohort.asked if item.device == device]


def text_of(cohort: FakeCohort, kind: str) -> str:
    (text,) = [event.text for event in cohort.events if event.kind == kind]
    return text


def lie(half: Any, change: Any) -> None:
    """Lets a device send other sums of its gradient."""
    honest = half.own.refine

    def refine(ask: Ask) -> Answer:
        answer = honest(ask)
        sent = answer.parts["gradient"]
        return replace(answer, parts={"gradient": change(sent)})

    half.own.refine = refine


# --- a round


def test_the_head_is_that_of_sums_in_clear():
    """Up to the rounding of rows to multiples of 2^-8 and of one device's gradient to float16."""
    fleet, plain = summed(), devices(method="classstats", **REFINE)
    server, other = server_of(), make_server("classstats", robust="off", **REFINE)
    (cohort,) = play(server, fleet)
    play(other, plain)
    assert steps_of(cohort) == [KEYS, SHARES, INPUT, UNMASK, *["refine"] * STEPS, "learn"]
    assert "refined by 5 sums of the gradients of 5 devices; its objective" in text_of(cohort, "head-refined")
    data = images(7).inputs
    found, expected = server.global_model()(data).softmax(dim=1), other.global_model()(data).softmax(dim=1)
    assert (found - expected).abs().max() < 0.01
    closed = make_server(SUMMED)
    play(closed, devices(method=SUMMED))
    assert (closed.global_model()(data).softmax(dim=1) - expected).abs().max() > 0.02
    assert {accuracy(half) for half in fleet.values()} == {1.0}
    assert all(half.own.space.is_refined for half in fleet.values())


def test_auto_refines_where_sums_are_secure_only():
    (cohort,) = play(server_of(refine="auto"), summed(refine="auto"))
    assert "head-refined" in cohort.kinds
    (cohort,) = play(make_server("classstats", refine="auto"), devices(method="classstats", refine="auto"))
    assert steps_of(cohort) == ["summarise", "learn"]


def test_a_device_sends_its_gradient_only_under_masks():
    (cohort,) = play(server_of(), summed())
    answers = cohort.answers("a", "refine")
    assert [list(parts) for parts in answers] == [["gradient"]] * STEPS
    assert all(isinstance(parts["gradient"], SecureMessage) for parts in answers)
    sizes = {parts["gradient"].gradient.shape for parts in answers}  # type: ignore[attr-defined]
    assert sizes == {((4 * 17 + 2) * 7,)}
    assert {item.answer.samples for item in cohort.asked if item.answer is not None} == {1}


def test_a_device_without_counted_rows_sends_zeros():
    """That it has none would be news of it; and without it, nothing were known of the others' gradient."""
    server, fleet = server_of(min_samples=20), summed(min_samples=20)
    few = TensorData(images(1).inputs[:40], images(1).labels[:40])
    fleet["c"] = type(fleet["c"])(fleet["c"].config, replace(fleet["c"].local, data=few))
    (cohort,) = play(server, fleet)
    assert fleet["c"].own.moments.labels == ()
    assert len(cohort.answers("c", "refine")) == STEPS
    assert "of the gradients of 5 devices" in text_of(cohort, "head-refined")


# --- devices that do not answer


def test_without_one_devices_gradient_the_closed_form_stays():
    server, fleet = server_of(), summed()
    (cohort,) = play(server, fleet, silent=[("refine", "c")])
    assert steps_of(cohort) == [KEYS, SHARES, INPUT, UNMASK, "refine", "learn"]
    assert "c did not answer, so nothing is known of the gradient" in text_of(cohort, "gradient-left-out")
    assert "the closed form is used" in text_of(cohort, "not-refined")
    assert not fleet["a"].own.space.is_refined
    assert accuracy(fleet["a"]) == 1.0


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_device_that_vanishes_ends_the_refinement(done):
    """After two sums the head of the steps before is used; one alone could not tell whether it is better."""
    fleet = summed()
    (cohort,) = play(server_of(), fleet, silent=[(FIRST + done, "c")])
    assert steps_of(cohort) == [KEYS, SHARES, INPUT, UNMASK, *["refine"] * (done + 1), "learn"]
    assert fleet["a"].own.space.is_refined is (done > 1)
    if done > 1:
        assert f"by {done} sums of the gradients of 5 devices" in text_of(cohort, "head-refined")
        assert "too few rows took part in the next sum" in text_of(cohort, "head-refined")
    else:
        assert "the closed form is used" in text_of(cohort, "not-refined")
    assert ("not-refined" in cohort.kinds) is (done < 2)


def test_a_device_that_is_in_no_sum_is_not_asked():
    fleet = summed()
    (cohort,) = play(server_of(), fleet, silent=[(INPUT, "c")])
    assert "refine" not in steps_of(cohort, "c")
    assert "of the gradients of 4 devices" in text_of(cohort, "head-refined")


# --- groups, newcomers, forgetting


def test_a_group_that_lacks_a_device_is_left_out():
    settings: dict[str, Any] = {"groups": 3, "robust": "gross"}
    server, fleet = server_of(**settings), summed("abcdefghijkl", **settings)
    (cohort,) = play(server, fleet, silent=[(4 * 3 + 1, "c")])
    assert text_of(cohort, "gradient-left-out").startswith(f"{members_of(server)['c']}: c did not answer")
    assert "of the gradients of 8 devices" in text_of(cohort, "head-refined")
    assert fleet["a"].own.space.is_refined


def test_newcomers_get_the_head_until_the_merge_has_grown():
    server, fleet = server_of(), summed("abcdefgh")
    play(server, {name: fleet[name] for name in "abcde"})
    head = server.merge_name
    play(server, {name: fleet[name] for name in "abcdef"}, completed=1)
    assert server.merge_name == head
    assert fleet["f"].own.space.is_refined
    (cohort,) = play(server, fleet, completed=2)
    assert "refine" not in {item.step for item in cohort.asked}
    assert "1 sum of the merge is of earlier rounds" in text_of(cohort, "not-refined")
    assert not any(half.own.space.is_refined for half in fleet.values())
    (cohort,) = play(server, fleet, completed=3)
    assert cohort.asked == []
    assert cohort.events == []


def test_a_head_ends_with_a_sum_that_is_forgotten():
    server, fleet = server_of(max_in_sum=4), summed("abcdefgh", max_in_sum=4)
    play(server, {name: fleet[name] for name in "abcd"})
    (cohort,) = play(server, fleet, completed=1)
    assert server.state_dict()["head"] is None, "the merge has grown to twice its rows"
    alone = server_of(max_in_sum=4)
    (cohort,) = play(alone, {name: fleet[name] for name in "efgh"})
    assert alone.state_dict()["head"] is not None
    alone.forget("e", cohort)
    assert alone.state_dict()["head"] is None
    assert alone.global_model() is None


def test_a_restored_server_keeps_the_head_of_its_sums():
    server, fleet = server_of(), summed()
    (cohort,) = play(server, fleet)
    again = server_of()
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    again.merge_parts(cohort)
    assert again.merge_name == server.merge_name


# --- devices that lie


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: HeadGradient(gradient=-sent.gradient, scale=sent.scale, loss=sent.loss, rows=sent.rows),
        lambda sent: HeadGradient(gradient=sent.gradient, scale=sent.scale * 2**9, loss=sent.loss, rows=sent.rows),
        lambda sent: HeadGradient(gradient=sent.gradient, scale=sent.scale, loss=1e9, rows=sent.rows),
        lambda sent: HeadGradient(gradient=sent.gradient, scale=sent.scale, loss=sent.loss, rows=sent.rows + 1),
        lambda sent: HeadGradient(gradient=sent.gradient + 500, scale=sent.scale, loss=sent.loss, rows=sent.rows),
    ],
)
def test_sums_that_contradict_the_statistics_are_not_used(change):
    """Whose fault it is, nobody can say; the closed form stays."""
    fleet = summed()
    lie(fleet["c"], change)
    (cohort,) = play(server_of(), fleet)
    assert "gradient-left-out" in cohort.kinds
    assert not fleet["a"].own.space.is_refined
    assert not any(event.device for event in cohort.events)


def test_a_wrong_mask_spoils_the_sum_and_is_noticed():
    fleet = summed()
    server = server_of()
    honest = server.sums_at

    async def spoilt(*arguments: Any):
        async for name, sent in honest(*arguments):
            noise = np.random.default_rng(0).integers(-(2**39), 2**39, sent.gradient.shape) / 4.0**8
            yield name, HeadGradient(gradient=noise, scale=1.0, loss=sent.loss, rows=sent.rows)

    server.sums_at = spoilt
    (cohort,) = play(server, fleet)
    assert "gradient-left-out" in cohort.kinds
    assert torch.isfinite(server.global_model()(images(7).inputs)).all()
