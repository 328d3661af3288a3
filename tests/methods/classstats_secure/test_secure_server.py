"""The server half of secure sums: merge, drop-outs, newcomers, forgetting, and a failed sum."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats_secure.sum_fleet import (
    CLASSES,
    ROWS,
    SUMMED,
    accuracy,
    config_of,
    devices,
    images,
    make_server,
    members_of,
)
from support.wire_samples import make_contract

from fleetdistill.errors import ConfigurationError, QuorumNotReached, RefusedError, RunError
from fleetdistill.knowledge import SecureMessage
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, STEPS, UNMASK, unusable
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.wire.codec import encode
from fleetdistill.wire.payload import chunks
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.figures import sums_of
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.classstats_secure import sum_server
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.methods.traffic import declared_parts
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.testing import FakeCohort, play

# --- one sum


def test_a_sum_gives_all_devices_the_fleets_space():
    fleet = devices()
    (cohort,) = play(make_server(), fleet)
    assert {accuracy(half) for half in fleet.values()} == {1.0}
    assert accuracy(fleet["a"], "personal") == 1.0
    assert cohort.kinds == ["secure-sum", "other-dimensions"]
    assert "5 devices" in cohort.events[0].text
    expected = ROWS * 5 * config_of().guarantee.mu * math.sqrt(4 / 5)
    assert cohort.figures["strength"] == pytest.approx(expected, rel=0.05)
    (made,) = sums_of(cohort.figures).values()
    assert (made.asked, made.keys, made.boxes, made.inputs, made.signatures, made.shares) == (5, 5, 5, 5, None, 5)
    assert (made.min_devices, made.threshold, made.noise_shares) == (4, 4, 4)
    assert (made.dropped, made.failure) == ({}, "")


def test_no_answer_contains_rows_or_their_number():
    (cohort,) = play(make_server(), devices())
    asked = [item for item in cohort.asked if item.device == "a"]
    assert [item.step for item in asked] == [KEYS, SHARES, INPUT, UNMASK, "learn"]
    assert {item.answer.samples for item in asked if item.answer is not None} == {1}
    assert [sorted(parts) for parts in cohort.answers("a")] == [["keys"], ["boxes"], ["numbers"], ["shares"], []]


def test_every_device_gets_the_same_list_of_devices():
    (cohort,) = play(make_server(), devices())
    for step in (KEYS, SHARES, UNMASK):
        first, *others = (cohort.sent(name, step)[0]["session"] for name in "abcde")
        assert all(other == first for other in others), step


@pytest.mark.parametrize("step", [KEYS, SHARES, INPUT, UNMASK])
def test_the_sum_goes_on_without_a_device(step):
    server, fleet = make_server(min_in_sum=4), devices(min_in_sum=4)
    (cohort,) = play(server, fleet, silent=[(step, "c")])
    assert set(members_of(server)) == set("abcde") - (set() if step == UNMASK else {"c"})
    assert f"dropped out: c at {step}" in cohort.events[0].text
    assert accuracy(fleet["a"]) == 1.0


def test_the_event_names_the_first_of_many_that_dropped_out():
    names = "abcdefghijklmnopqrstu"
    (cohort,) = play(make_server(SUMMED), devices(names, 40, SUMMED), silent=[(INPUT, name) for name in names[:6]])
    assert "dropped out: a, b, c, d, e and 1 more at secure_input" in cohort.events[0].text


def test_figures_of_a_failed_sum_say_where_it_failed():
    """Of five devices, two do not send their numbers; four must, and the shares are not asked for."""
    server, fleet = make_server(), devices("abcdefgh")
    play(server, {name: fleet[name] for name in "abc"})
    (cohort,) = play(server, fleet, completed=1, silent=[(INPUT, "d"), (INPUT, "g")])
    (failed,) = sums_of(cohort.figures).values()
    assert failed.failure == "3 of 5 devices answered secure_input, 4 were needed"
    assert (failed.asked, failed.keys, failed.boxes, failed.inputs, failed.shares) == (5, 5, 5, 3, None)
    assert (failed.threshold, failed.dropped) == (4, {INPUT: ["d", "g"]})
    assert failed.dropped_text == "d, g at secure_input"


def test_a_sum_without_keys_has_no_threshold_and_no_noise():
    server, fleet = make_server(SUMMED), devices("abcdef", method=SUMMED)
    play(server, {name: fleet[name] for name in "abc"})
    (cohort,) = play(server, fleet, completed=1, silent=[(KEYS, "d"), (KEYS, "e")])
    (failed,) = sums_of(cohort.figures).values()
    assert failed.failure == "1 of 3 devices answered secure_keys, 3 were needed"
    assert (failed.keys, failed.boxes, failed.threshold, failed.noise_shares) == (1, None, None, None)


@pytest.mark.parametrize("step", [KEYS, SHARES, INPUT, UNMASK])
def test_too_few_devices_make_the_first_round_short(step):
    server = make_server()
    with pytest.raises(QuorumNotReached):
        play(server, devices(), silent=[(step, "c"), (step, "d")])
    assert server.global_model() is None


def test_a_first_sum_needs_three_devices():
    with pytest.raises(QuorumNotReached, match="2 devices answered, the quorum is 3"):
        play(make_server(), devices("ab"))


def test_the_noise_of_a_sum_is_that_of_its_honest_devices():
    server = make_server(min_in_sum=4, colluders=1)
    play(server, devices(min_in_sum=4, colluders=1))
    (part,) = (value for value, _ in server.state_dict()["parts"].values())
    assert part["mu"] == pytest.approx(config_of().guarantee.mu * math.sqrt(3 / 5))
    assert part["counts"].sum() == pytest.approx(5 * ROWS, abs=6 * 2 / (part["mu"] * math.sqrt(0.1)))


def test_too_few_rows_end_the_run_with_the_number_that_suffices():
    with pytest.raises(RunError, match=r"on each of 3 devices are too few for the noise at epsilon 0.1; use .* better"):
        play(make_server(epsilon=0.1), devices("abc", rows=8, epsilon=0.1))


# --- further sums


def test_newcomers_wait_for_company_and_learn_at_once():
    server, fleet = make_server(), devices("abcdefgh")
    first = {name: fleet[name] for name in "abcde"}
    play(server, first)
    (cohort,) = play(server, {name: fleet[name] for name in "abcdefg"}, completed=1)
    assert cohort.kinds == ["waiting-for-batch"]
    assert [item.device for item in cohort.asked] == ["f", "g"], "only what they lack"
    assert {item.step for item in cohort.asked} == {"learn"}
    assert accuracy(fleet["g"]) == 1.0
    assert not server.is_due(dict.fromkeys("abcdefg", ""))
    assert server.is_due(dict.fromkeys("abcdefgh", ""))
    (cohort,) = play(server, fleet, completed=2)
    assert cohort.kinds == ["secure-sum", "other-dimensions"]
    assert len(set(members_of(server).values())) == 2
    assert len(server.state_dict()["parts"]) == 2
    assert {item.device for item in cohort.asked if item.step == KEYS} == set("fgh")
    assert {item.device for item in cohort.asked if item.step == "learn"} == set(fleet)


def test_a_later_sum_that_fails_does_not_fail_the_round():
    server, fleet = make_server(), devices("abcdefgh")
    play(server, {name: fleet[name] for name in "abcde"})
    before = server.merge_name
    (cohort,) = play(server, fleet, completed=1, silent=[(INPUT, "f")])
    assert cohort.kinds == ["secure-sum-failed"]
    assert server.merge_name == before
    assert set(members_of(server)) == set("abcde")


def test_more_devices_than_a_sum_may_have_form_two_sums():
    server, fleet = make_server(max_in_sum=4), devices("abcdefgh", max_in_sum=4)
    play(server, fleet, rounds=2)
    sums = members_of(server)
    assert [{name for name in sums if sums[name] == key} for key in dict.fromkeys(sums.values())] == [
        set("abcd"),
        set("efgh"),
    ]


def test_forgetting_a_device_removes_its_whole_sum():
    server, fleet = make_server(), devices("abcdefgh")
    play(server, {name: fleet[name] for name in "abcde"})
    (cohort,) = play(server, fleet, completed=1)
    both = server.merge_name
    server.forget("g", cohort)
    assert set(members_of(server)) == set("abcde")
    assert cohort.kinds[-1] == "batch-forgotten"
    assert "2 other devices" in cohort.events[-1].text
    assert server.merge_name != both
    server.forget("nobody", cohort)
    server.forget("a", cohort)
    assert not members_of(server)
    assert server.global_model() is None


def test_a_restored_server_goes_on_as_before():
    server, fleet = make_server(), devices("abcde")
    (cohort,) = play(server, fleet)
    again = make_server()
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    assert again.merge_name == server.merge_name
    for one in (server, again):
        one.forget("a", cohort)
        assert not members_of(one)


def test_the_same_answers_give_the_same_space():
    """A round that is repeated after a crash, with the answers that the store has, merges to the same digest."""
    server, fleet = make_server(), devices()
    (cohort,) = play(server, fleet)
    stored = {(item.step, item.device): item.answer for item in cohort.asked}
    replayed = make_server()

    def repeat(name: str, ask: Ask) -> Answer | None:
        return stored[ask.step, name]

    play(replayed, {name: partial(repeat, name) for name in fleet})
    assert replayed.merge_name == server.merge_name


# --- devices that send what others cannot use


class Spoiling(FakeCohort):
    """A cohort in which one device's keys or boxes are changed on their way to the server."""

    spoils: tuple[str, str] = ("", "")

    async def ask(self, step: str, *arguments: Any, **settings: Any) -> Any:
        async for answer in super().ask(step, *arguments, **settings):
            if (step, answer.device) == self.spoils:
                (name,) = answer.parts
                sent = getattr(answer.part(name, SecureMessage), name).copy()
                sent[..., :32] = 0  # no X25519 key, and no box
                spoilt: dict[str, Any] = {name: sent}
                yield DeviceAnswer(answer.device, 1, encode({name: SecureMessage(**spoilt)}))
            else:
                yield answer


@pytest.mark.long
@pytest.mark.parametrize("step", [KEYS, SHARES])
def test_whose_boxes_do_not_open_is_out_of_the_next_sum(step):
    server, fleet = make_server(min_in_sum=3), devices("abcdefg", min_in_sum=3)
    first, liar = Spoiling({name: fleet[name] for name in "abcd"}, number=1), "a" if step == KEYS else "c"
    first.spoils = (step, liar)
    with pytest.raises(QuorumNotReached):
        asyncio.run(server.round(first))
    again = make_server(min_in_sum=3)
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    (cohort,) = play(again, {name: fleet[name] for name in "abcd"}, number=2)
    assert set(members_of(again)) == set("abcd") - {liar}
    assert [(event.kind, event.device) for event in cohort.events][:2] == [("wrong-share", liar), ("secure-sum", "")]
    (cohort,) = play(again, fleet, number=3, completed=1)
    assert set(members_of(again)) == set("abcdefg"), "of one sum only: the device that named it may lie, too"


def test_every_event_about_a_sum_says_that_it_is_not_reviewed():
    kinds = {"secure-sum", "secure-sum-failed", "waiting-for-batch", "wrong-share", "implausible-sum"}
    server, fleet = make_server(min_in_sum=3, epsilon=20.0), devices("abcdefgh", min_in_sum=3, epsilon=20.0)
    spoiling = Spoiling(fleet)
    spoiling.spoils = (SHARES, "c")
    with pytest.raises(QuorumNotReached):
        asyncio.run(server.round(spoiling))
    cohorts = [spoiling, *play(server, {name: fleet[name] for name in "abcd"}, number=2)]
    cohorts += play(server, {name: fleet[name] for name in "abcde"}, completed=1)
    cohorts += play(server, fleet, completed=2, silent=[(INPUT, "f"), (INPUT, "g")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_server, "why_implausible", lambda sums, parameters: "a class has -1000 rows")
        cohorts += play(server, fleet, number=9)
    server.forget("a", cohorts[0])
    events = [event for cohort in cohorts for event in cohort.events if event.kind != "other-dimensions"]
    assert {event.kind for event in events} == {*kinds, "batch-forgotten"}
    assert all(event.text.endswith(" (not yet reviewed by a cryptographer)") for event in events)


def test_who_is_in_a_sum_that_is_thrown_away_is_in_no_other(monkeypatch):
    """Without noise, two sums that differ by a device would tell its numbers. Device c gave no share here."""
    server, fleet = make_server(SUMMED), devices(method=SUMMED)
    monkeypatch.setattr(sum_server, "why_implausible", lambda sums, parameters: "a class has -1000 rows")
    with pytest.raises(QuorumNotReached):
        play(server, fleet, silent=[(UNMASK, "c")])
    assert set(members_of(server)) == set("abcde")


class Accusing(FakeCohort):
    """A cohort in which two devices decline the masked input with reasons that fit no other device of the sum."""

    def declined(self, step: str) -> dict[str, str]:
        return {"a": unusable("a", "no box"), "b": unusable("nobody", "no box")} if step == INPUT else {}


def test_a_reason_that_names_no_other_device_blames_nobody():
    server, fleet = make_server(min_in_sum=3), devices("abcd", min_in_sum=3)
    with pytest.raises(QuorumNotReached):
        asyncio.run(server.round(Accusing(fleet, silent=[(INPUT, "a"), (INPUT, "b")])))
    (cohort,) = play(server, fleet, number=2)
    assert set(members_of(server)) == set("abcd")
    assert "wrong-share" not in cohort.kinds


# --- without noise


def test_a_sum_without_noise_is_that_of_classstats():
    """The server's merge of one sum has the moments that classstats merges from the devices' own statistics."""
    fleet, plain = devices(method=SUMMED), devices(method="classstats")
    server, other = make_server(SUMMED), make_server("classstats", robust="off")
    play(server, fleet)
    play(other, plain)
    (part,) = (value for value, _ in server.state_dict()["parts"].values())
    assert part["counts"].tolist() == [ROWS * 5 / CLASSES] * CLASSES
    assert part["sums"].dtype == torch.float64
    data = images(7).inputs
    found, expected = server.global_model()(data), other.global_model()(data)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    assert (found.softmax(dim=1) - expected.softmax(dim=1)).abs().max() < 0.01, "features are multiples of 2^-8"
    assert {accuracy(half) for half in fleet.values()} == {1.0}
    assert accuracy(fleet["a"], "personal") == 1.0


def test_no_answer_of_a_sum_without_noise_tells_the_rows():
    (cohort,) = play(make_server(SUMMED), devices(method=SUMMED))
    assert {item.answer.samples for item in cohort.asked if item.answer is not None} == {1}
    assert [sorted(parts) for parts in cohort.answers("a")] == [["keys"], ["boxes"], ["numbers"], ["shares"], []]
    assert cohort.kinds == ["secure-sum"]


def test_sums_without_noise_merge_exactly_over_batches():
    fleet = devices("abcdefgh", method=SUMMED)
    one, two = make_server(SUMMED), make_server(SUMMED)
    play(one, devices("abcdefgh", method=SUMMED))
    play(two, {name: fleet[name] for name in "abcde"})
    play(two, fleet, completed=1)
    assert len(two.state_dict()["parts"]) == 2
    data = images(7).inputs
    torch.testing.assert_close(two.global_model()(data), one.global_model()(data), rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("method", ["classstats_secure", SUMMED])
def test_devices_of_a_sum_that_is_thrown_away(method):
    """Without noise they are in no further sum, because the server knows this one; with noise they are summed again."""
    noise: dict[str, Any] = {"epsilon": 20.0} if method == "classstats_secure" else {}
    server, fleet = make_server(method, **noise), devices("abcdefgh", method=method, **noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_server, "why_implausible", lambda sums, parameters: "a class has -1000 rows")
        with pytest.raises(QuorumNotReached):  # its numbers are in the sum, though e gives no shares
            play(server, {name: fleet[name] for name in "abcde"}, silent=[(UNMASK, "e")])
    (cohort,) = play(server, fleet, number=5)
    asked = {item.device for item in cohort.asked if item.step == KEYS}
    assert asked == set("fgh") if method == SUMMED else set("abcdefgh")
    assert set(members_of(server)) >= asked


def test_devices_that_gave_shares_of_no_sum_stay_out():
    server, fleet = make_server(SUMMED), devices("abcdefgh", method=SUMMED)
    with pytest.raises(QuorumNotReached):
        play(server, {name: fleet[name] for name in "abcde"}, silent=[(UNMASK, "d"), (UNMASK, "e")])
    with pytest.raises(QuorumNotReached):
        (cohort,) = play(server, {name: fleet[name] for name in "abc"}, number=2)
    cohort = FakeCohort({name: fleet[name] for name in "abcf"}, number=3)
    with pytest.raises(QuorumNotReached):
        asyncio.run(server.round(cohort))
    text = "1 new device must wait for a sum of at least 3; 3 devices more can be in no further sum of this run"
    text += " (not yet reviewed by a cryptographer)"
    assert [event.text for event in cohort.events] == [text]
    (cohort,) = play(server, fleet, number=8)  # after the pause of those who did not answer
    assert {item.device for item in cohort.asked if item.step == KEYS} == set("defgh")
    assert accuracy(fleet["a"]) == 1.0


def test_devices_of_a_forgotten_sum_without_noise_stay_out():
    """A curious server could keep the old sum, and a new one of all but one of its devices would give that one's."""
    server, fleet = make_server(SUMMED), devices("abcdefgh", method=SUMMED)
    play(server, {name: fleet[name] for name in "abcde"})
    (cohort,) = play(server, fleet, completed=1)
    server.forget("a", cohort)
    assert "in no sum of this run again" in cohort.events[-1].text
    server.forget("b", cohort)
    assert cohort.kinds.count("batch-forgotten") == 1, "the sum is gone already"
    assert not server.is_due(dict.fromkeys("bcde", "")) or server.global_model() is not None
    (cohort,) = play(server, {name: fleet[name] for name in "cdefgh"}, completed=2)
    assert {item.step for item in cohort.asked} == {"learn"}
    assert accuracy(fleet["c"]) == 1.0
    server.forget("f", cohort)
    assert server.global_model() is None


def test_a_restored_server_goes_on_with_exact_sums():
    server, fleet = make_server(SUMMED), devices("abcde", method=SUMMED)
    (cohort,) = play(server, fleet)
    again = make_server(SUMMED)
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    again.merge_parts(cohort)
    assert again.merge_name == server.merge_name


# --- groups


@pytest.mark.long
@pytest.mark.parametrize("method", ["classstats_secure", SUMMED])
def test_groups_form_separate_sums_at_random(method):
    names = "abcdefghijkl"
    server, fleet = make_server(method, groups=3), devices(names, method=method, groups=3)
    (cohort,) = play(server, fleet)
    sums = members_of(server)
    parts = {key: {name for name in sums if sums[name] == key} for key in set(sums.values())}
    assert sorted(len(members) for members in parts.values()) == [4, 4, 4]
    assert set().union(*parts.values()) == set(names)
    assert set("abcd") not in parts.values(), "not by id"
    assert cohort.kinds.count("secure-sum") == 3
    assert [(one.inputs, one.threshold) for one in sums_of(cohort.figures).values()] == [(4, 3)] * 3
    assert [f"of group {number} is made" in cohort.events[number - 1].text for number in (1, 2, 3)] == [True] * 3
    assert {accuracy(half) for half in fleet.values()} == {1.0}


def test_too_few_devices_form_fewer_groups():
    server, fleet = make_server(SUMMED, groups=3), devices("abcdefghijklmno", method=SUMMED, groups=3)
    play(server, {name: fleet[name] for name in "abcdefghi"})
    play(server, {name: fleet[name] for name in "abcdefghijklm"}, completed=1)
    assert sorted(members_of(server)) == list("abcdefghijklm")
    assert len(set(members_of(server).values())) == 4


def test_one_group_that_fails_leaves_the_others_sums():
    server, fleet = make_server(SUMMED, groups=3), devices("abcdefghi", method=SUMMED, groups=3)
    (cohort,) = play(server, fleet, silent=[(INPUT, "c")])
    assert sorted(cohort.kinds) == ["secure-sum", "secure-sum", "secure-sum-failed"]
    assert len(members_of(server)) == 6
    others = set(fleet) - members_of(server).keys() - {"c"}
    assert {accuracy(fleet[name]) for name in others} == {1.0}, "they learn without being counted"


@pytest.mark.long
@pytest.mark.parametrize("method", ["classstats_secure", SUMMED])
def test_a_hostile_devices_group_is_left_out(method):
    """Its many rows with turned labels shift the whole sum, which the tests of hostile devices find."""
    noise = {"epsilon": 20.0} if method == "classstats_secure" else {}
    settings: dict[str, Any] = {"groups": 4, "robust": "gross", **noise}
    server, fleet = make_server(method, **settings), devices("abcdefghijkl", method=method, **settings)
    data = images(ord("c"), 20 * ROWS)
    turned = TensorData(data.inputs, (data.labels + 1) % CLASSES)
    half = fleet["c"]
    fleet["c"] = type(half)(half.config, replace(half.local, data=turned))
    (cohort,) = play(server, fleet)
    assert len(members_of(server)) == 12
    counted = {name for name in fleet if cohort.sent(name, "learn")[0]["plan"].values["counted"]}  # type: ignore[attr-defined]
    assert len(counted) == 9
    assert "c" not in counted
    (left_out,) = [event for event in cohort.events if event.kind == "summary-left-out"]
    assert left_out.text.startswith("sum ")
    assert not left_out.device
    assert accuracy(fleet["a"]) == 1.0


def test_groups_share_the_noise_of_their_own_sum_only():
    config, one = config_of(groups=4), config_of()
    assert config.device_mu(20) == one.device_mu(5) == pytest.approx(one.guarantee.mu * math.sqrt(4))
    assert server_class("classstats_secure").needs(config).min_devices == 12
    server = make_server(groups=3)
    (cohort,) = play(server, devices("abcdefghijkl", groups=3))
    expected = ROWS * 12 * one.guarantee.mu * math.sqrt(3 / 12)
    assert cohort.figures["strength"] == pytest.approx(expected, rel=0.06)


# --- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keys": "signed"}, "keys"),
        ({"min_in_sum": 2}, "min_in_sum must be >= 3"),
        ({"min_in_sum": 1001}, "min_in_sum"),
        ({"graph": "star"}, "unknown graph 'star', expected one of complete, ring"),
        ({"graph": "ring", "keys": "certificates"}, "keys must be 'unsigned' with graph = 'ring'"),
        ({"graph": "ring", "max_in_sum": 11}, "no ring of 11 devices is safe .* use a complete graph"),
        ({"graph": "ring", "max_in_sum": 10_001}, "max_in_sum"),
        ({"max_in_sum": 2}, "max_in_sum must be >= 3"),
        ({"min_in_sum": 10, "max_in_sum": 9}, "max_in_sum must be >= 10"),
        ({"colluders": -1}, "colluders must be >= 0"),
        ({"min_in_sum": 4, "colluders": 4}, "colluders"),
        ({"keys": "roster", "min_in_sum": 8, "colluders": 3}, "of 8 devices more than 2 that work with the server"),
        ({"keys": "certificates", "colluders": 2}, "of 3 devices more than 1 that work with the server"),
        ({"colluders": "many"}, "colluders"),
        ({"max_rows": 1000}, "max_rows must be 2\\^20"),
        ({"participation_ratio": 0.5}, "participation_ratio must be 1"),
        ({"exact": False}, "exact must be true"),
        ({"robust": "gross"}, "robust must be 'off'"),
        ({"count_cap": 3.0}, "count_cap 0"),
        ({"robust": "gross", "groups": 2}, "set groups to 3 or more"),
        ({"groups": 0}, "groups must be >= 1"),
        ({"groups": 101}, "groups"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        config_of(**settings)


def test_a_ring_has_as_many_neighbours_as_its_bounds_ask():
    """Of the largest sum, so that all devices agree; and it needs two thirds of its devices, whatever is set."""
    for method in ("classstats_secure", SUMMED):
        parameters = config_of(method, graph="ring", max_in_sum=10_000).parameters_for(2_000, 10, 64)
        assert (parameters.degree, parameters.most, parameters.least) == (100, 10_000, 1_334)
    assert config_of(graph="ring", min_in_sum=3).fewest(30) == 21
    assert config_of(graph="ring", min_in_sum=25).fewest(30) == 25


def test_a_ring_gives_the_fleets_space():
    ring: dict[str, Any] = {"graph": "ring", "max_in_sum": 20, "epsilon": 20.0}
    fleet = devices("abcdefghijklmnop", **ring)
    (cohort,) = play(make_server(**ring), fleet, silent=[(INPUT, "c")])
    assert {accuracy(half) for name, half in fleet.items() if name != "c"} == {1.0}
    for name in "ab":
        message = cohort.sent(name, SHARES)[0]["session"]
        assert isinstance(message, SecureMessage)
        assert (len(message.entries), message.devices) == (11, 16)
    (made,) = sums_of(cohort.figures).values()
    assert (made.keys, made.inputs, made.threshold) == (16, 15, 8)


def test_the_rule_for_the_fewest_and_the_honest_devices():
    config = config_of()
    assert [config.fewest(asked) for asked in (1, 3, 4, 5, 10, 100, 1000)] == [3, 3, 3, 4, 7, 67, 667]
    assert [config.honest(asked) for asked in (3, 10, 100)] == [3, 7, 67]
    for keys in ("certificates", "roster"):
        assert [config_of(keys=keys).honest(asked) for asked in (3, 10, 100)] == [3, 6, 57]
    assert config_of(min_in_sum=8, colluders=2).honest(10) == 6
    assert [config_of(min_in_sum=4).fewest(asked) for asked in (3, 5, 100)] == [4, 4, 67], "never below the rule"
    assert config_of(max_rows=1 << 24).parameters(10, 64, least=3, honest=3).width == 8
    assert config_of().parameters(10, 64, least=3, honest=3).width == 7


@pytest.mark.parametrize(
    ("keys", "against"),
    [
        ("unsigned", "a server that follows the protocol"),
        ("certificates", "a server that follows the protocol, and anyone else without its CA's key"),
        ("roster", "a server without the secret roster key"),
    ],
)
def test_the_guarantee_says_against_whom(keys, against):
    text = f"each row of each device is (1, 1e-5)-private against {against}, by secure sums that no cryptographer has"
    assert config_of(keys=keys, epsilon=1.0).guarantee.sentence.startswith(text)


@pytest.mark.parametrize(
    ("keys", "fits", "refused"),
    [
        ("unsigned", {100}, {99, 101, 260}),
        ("certificates", {261, 660, 2308}, {100, 260, 2309}),
        ("roster", {260}, {100, 259, 261, 660}),
    ],
)
def test_the_front_checks_the_size_of_keys(keys, fits, refused):
    """Of certificates, whose sizes differ, it checks the bounds."""
    server = make_server(keys=keys)
    uploads = [
        contract_pb2.PartShapes(
            part=part, tensors=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in one.declared.items()]
        )
        for part, one in declared_parts(server.run_exchanges()).items()
    ]
    contract = make_contract(method="classstats_secure", uploads=uploads)

    def take(size: int) -> None:
        payload = encode({"keys": SecureMessage(keys=np.zeros(size, np.uint8))})
        ingest = Ingest("d1", payload.header(), contract, {"keys": "secure_message"})
        ingest.start(MemoryBlobs().stage("key", payload.parts))
        for chunk in chunks(payload.source, payload.slots, 0):
            ingest.feed(chunk)
        ingest.finish()

    for size in fits:
        take(size)
    for size in refused:
        with pytest.raises(RefusedError, match=r"keys has shape|'keys' has \d+ (rows|bytes)") as error:
            take(size)
        assert error.value.code == "bad-tensor"


def test_signed_keys_add_a_step():
    assert "secure_check" in STEPS
    server, fleet = make_server(keys="roster"), devices(keys="roster")
    with pytest.raises(QuorumNotReached):  # these devices have no signing keys
        play(server, fleet)
    assert np.isfinite(config_of(keys="roster").device_mu(5))


def test_a_declined_sum_says_why():
    cohort = FakeCohort(devices(keys="roster"))
    with pytest.raises(QuorumNotReached):
        asyncio.run(make_server(keys="roster").round(cohort))
    text = "the sum needs keys of a roster, and this device has no SecureTerms(signer=...)"
    assert {item.declined for item in cohort.asked} == {text}
