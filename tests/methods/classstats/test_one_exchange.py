"""Class statistics in one exchange: rounds, merges and guards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from methods.classstats.class_statistics_fleet import CLASSES, SHAPE, Rounds
from methods.classstats.one_exchange_fleet import (
    devices,
    fleet,
    images_of,
    make_device,
    make_server,
    space_of,
    statistics_of,
)
from numpy.testing import assert_allclose

from fleetdistill.errors import CannotAnswer, QuorumNotReached
from fleetdistill.knowledge import (
    GENERAL,
    PERSONAL,
    ClassCount,
    ClassSpace,
    Metric,
    Metrics,
    SharedStatistics,
)
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, projection, shrinkage_rule
from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    SpacePlan,
)
from fleetdistill.methods.classstats.shared_statistics import from_wire, merge, moments_of
from fleetdistill.models.scattering import Scattering
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import extract
from fleetdistill_server.methods.classstats.merge import MergeRules, merge_moments


def equal(one: ClassSpace, other: ClassSpace) -> bool:
    return all(np.array_equal(mine, its) for mine, its in zip(vars(one).values(), vars(other).values(), strict=True))


# --- one exchange


def test_one_round_is_all_and_everybody_has_the_space() -> None:
    played = fleet("abc").play()
    assert played.steps() == [(step, name) for step in ("summarise", "learn") for name in "abc"]
    for half in played.halves.values():
        assert set(half.variants()) == {GENERAL, PERSONAL}
    assert played.play().steps() == []


def projected(features_nf: np.ndarray) -> np.ndarray:
    """Features projected to 256 numbers, in float64."""
    return features_nf.astype(np.float64) @ projection(features_nf.shape[1], 256).astype(np.float64)


def test_the_space_is_that_of_all_rows_together_up_to_encoding() -> None:
    played = fleet("abc", rank=512).play()
    data = [half.local.data for half in played.halves.values()]
    big = [np.isin(item.labels, np.flatnonzero(np.bincount(item.labels) >= 5)) for item in data]
    inputs = torch.cat([one.inputs[torch.from_numpy(kept)] for one, kept in zip(data, big, strict=True)])
    labels = np.concatenate([one.labels.numpy()[kept] for one, kept in zip(data, big, strict=True)])
    rows = projected(extract(Scattering(SHAPE), inputs).flatten(1).numpy())
    whole = moments_of(rows, labels)
    expected = make_space(whole, shrinkage_rule(256, whole.df))
    space = space_of(played)
    assert space.counts.tolist() == whole.counts.tolist()
    assert int(space.df) == whole.df
    wanted = logits(expected, coordinates(expected, rows), CLASSES)
    result = logits(space, coordinates(space, rows), CLASSES)
    assert (result.argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.97


def test_all_devices_and_the_server_give_the_same_general_answer() -> None:
    played = fleet("abc").play()
    inputs = images_of([4, 4, 4, 4], 9).inputs
    server = played.server.global_model()
    assert server is not None
    expected = extract(server, inputs)
    for half in played.halves.values():
        assert_allclose(extract(half.variants()[GENERAL], inputs), expected, atol=1e-5)
    space = space_of(played)
    rows = projected(extract(Scattering(SHAPE), inputs).flatten(1).numpy())
    assert_allclose(expected, logits(space, coordinates(space, rows), CLASSES), atol=2e-2)


def test_a_device_learns_classes_that_it_has_never_seen() -> None:
    played = fleet("ab").play()
    unseen = images_of([0, 0, 0, 12], 9)
    result = extract(played.halves["a"].variants()[GENERAL], unseen.inputs).argmax(dim=1)
    assert (result == 3).float().mean() > 0.9


def test_features_are_computed_once_for_each_set_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Scattering.forward

    def counted(self: Scattering, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(Scattering, "forward", counted)
    half = make_device([11, 13, 0, 0], seed=77)
    other = make_device([0, 12, 14, 0], seed=78)
    seen.clear()  # the shapes were tried
    played = Rounds(make_server(), {"a": half, "b": other})
    seen.clear()
    played.play(3)
    assert sum(count for count in seen if count > 2) == 24 + 26  # two rows are measured


# --- what changes the merge


def test_a_newcomer_alone_is_asked_and_all_get_the_new_space() -> None:
    played = fleet("ab").play()
    before = space_of(played)
    played.halves["c"] = devices()["c"]
    played.play()
    assert played.steps() == [("summarise", "c"), *(("learn", name) for name in "abc")]
    assert not equal(space_of(played), before)
    assert played.quorums == [("summarise", None), ("learn", None), ("summarise", 0.0), ("learn", 0.0)]


def test_who_leaves_stays_in_the_merge_until_it_is_forgotten() -> None:
    played = fleet("abc").play()
    whole = space_of(played)
    played.away = {"c"}
    assert played.play().steps() == []
    played.server.forget("c", played)
    played.play()
    assert played.steps() == [("learn", "a"), ("learn", "b")]
    assert equal(space_of(played), space_of(fleet("ab").play()))
    assert not equal(space_of(played), whole)


def test_added_subtracted_and_added_again_it_is_the_same_space() -> None:
    played = fleet("ab").play()
    first = space_of(played)
    played.halves["c"] = devices()["c"]
    with_c = space_of(played.play())
    played.server.forget("c", played)
    del played.halves["c"]
    assert equal(space_of(played.play()), first)
    played.halves["c"] = devices()["c"]
    assert equal(space_of(played.play()), with_c)


def test_a_device_with_other_rows_is_asked_again_and_alone() -> None:
    played = fleet("ab").play()
    played.halves["b"], played.versions["b"] = make_device([0, 20, 30, 8], seed=5), "02"
    played.play()
    assert played.steps() == [("summarise", "b"), ("learn", "a"), ("learn", "b")]
    fresh = Rounds(make_server(), {"a": devices()["a"], "b": make_device([0, 20, 30, 8], seed=5)}).play()
    assert equal(space_of(played), space_of(fresh))


def test_a_round_is_due_only_where_somebody_lacks_something() -> None:
    played = fleet("ab")
    server = played.server
    present = {"a": "", "b": ""}
    assert server.is_due(present)
    played.play()
    assert not server.is_due(present)
    assert server.is_due({**present, "c": ""})
    assert server.is_due({"a": "", "b": "05"})
    assert not server.is_due({"a": ""})
    server.forget("b", played)
    assert server.is_due({"a": ""})


def test_who_does_not_answer_is_due_again_when_it_comes_back() -> None:
    played = fleet("ab").play()
    played.halves["c"], played.deaf = devices()["c"], {("summarise", "c")}
    present = dict.fromkeys("abc", "")

    def is_due(*here: str) -> bool:
        played.server.update_present(here)
        return played.server.is_due({device: present[device] for device in here})

    assert is_due(*"abc")
    played.play()
    assert not is_due(*"abc")
    assert not is_due(*"ab")
    assert is_due(*"abc")
    played.deaf = set()
    assert ("summarise", "c") in played.play().steps()


def test_who_missed_the_space_gets_it_in_the_next_round() -> None:
    played = fleet("abc")
    played.deaf = {("learn", "b")}
    played.play()
    played.deaf = set()
    steps = [played.play().steps() for _ in range(3)]
    assert [("learn", "b")] in steps
    assert steps[-1] == []


def test_after_a_round_that_fell_short_all_get_the_space_again() -> None:
    played = fleet("ab")
    played.deaf = {("learn", "a"), ("learn", "b")}
    played.fall_short()
    played.deaf = set()
    played.play()
    assert played.steps() == [("summarise", "a"), ("summarise", "b"), ("learn", "a"), ("learn", "b")]


def test_a_fleet_without_any_statistics_falls_short() -> None:
    played = fleet("ab")
    played.deaf = {("summarise", "a"), ("summarise", "b")}
    with pytest.raises(QuorumNotReached):
        played.play()


def test_device_without_space_declines_plan_without_space() -> None:
    half = make_device([9, 9, 0, 0])
    plan = SpacePlan(merge=7, counted=False, draw_seed=1).to_wire()
    with pytest.raises(CannotAnswer, match="this device has none; the server will send it with the next ask"):
        half.handle(Ask(round=1, step="learn", seed=1, parts={"plan": plan}))


def test_the_servers_state_comes_back_from_its_file() -> None:
    played = fleet("abc").play()
    other = make_server()
    other.load_state_dict(unpack_state(pack_state(played.server.state_dict())))
    assert pack_state(other.state_dict()) == pack_state(played.server.state_dict())
    assert not other.is_due(dict.fromkeys("abc", ""))
    other.forget("b", played)
    played.server.forget("b", played)
    assert pack_state(other.state_dict()) == pack_state(played.server.state_dict())


def test_a_devices_state_comes_back_from_its_file() -> None:
    played = fleet("ab", predictor="trained", predictor_steps=20).play()
    half, other = played.halves["a"], make_device([20, 12, 3, 0], seed=1, predictor="trained", predictor_steps=20)
    other.load_state_dict(unpack_state(pack_state(half.state_dict())))
    inputs = images_of([3, 3, 3, 3], 9).inputs
    for name, model in half.variants().items():
        assert torch.equal(extract(other.variants()[name], inputs), extract(model, inputs))


# --- guards


def test_a_class_of_one_device_is_used_with_an_event() -> None:
    played = fleet("ab").play()
    assert ("class-of-one-device", "classes [0, 2, 3] come from one device each; they are used") in played.events


def test_few_rows_are_an_event_and_the_shrinkage_goes_to_a_half() -> None:
    played = fleet("ab").play()
    assert any(kind == "few-rows" for kind, _ in played.events)
    assert float(space_of(played).shrinkage) == 0.5


def test_one_merged_class_makes_no_space_and_an_event() -> None:
    halves = {"a": make_device([9, 0, 0, 0]), "b": make_device([8, 0, 0, 0], seed=2)}
    played = Rounds(make_server(), halves).play()
    assert played.steps() == [("summarise", "a"), ("summarise", "b")]
    assert any(kind == "no-class-space" and "two classes" in text for kind, text in played.events)


def test_space_not_fitting_wire_is_event_and_does_not_end_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means that lie far apart beside almost no spread: well-formed, and 65,504 is not enough for their space."""
    played = fleet("ab")
    for half, label in zip(played.halves.values(), (0, 1), strict=True):
        sent = statistics_of(half)
        assert sent.means is not None
        assert sent.variances is not None
        far = replace(
            sent,
            labels=[label],
            counts=np.array([20], np.int32),
            means=np.full((1, 256), 60_000 * label, np.float16),
            directions=None,
            steps=None,
            variances=np.full(256, 1e-4, np.float16),
            df=np.array(19, np.int32),
        )
        monkeypatch.setattr(
            half, "own", SimpleNamespace(summarise=lambda far=far: Answer(parts={"statistics": far}, samples=20))
        )
    played.play()
    assert played.steps() == [("summarise", "a"), ("summarise", "b")]
    assert any(kind == "no-class-space" and "does not fit float16" in text for kind, text in played.events)


def test_device_without_large_enough_class_still_gets_space() -> None:
    halves = {**devices(), "small": make_device([2, 2, 2, 2], seed=4)}
    played = Rounds(make_server(), halves).play()
    sent = next(parts for step, name, parts in played.answered if (step, name) == ("summarise", "small"))
    assert sent["statistics"].labels == []  # type: ignore[attr-defined]
    assert played.notes_of["summarise", "small"]["classes_too_small"] == 4
    assert [played.notes_of["summarise", name]["classes_too_small"] for name in devices()] == [0] * 3
    text = "small has no class with at least 5 samples (min_samples); none of its rows are merged"
    assert [event for event in played.events if event[0] == "no-class-sent"] == [("no-class-sent", text)]
    assert GENERAL in played.halves["small"].variants()


def test_a_device_of_another_scale_is_left_out_of_the_merge() -> None:
    events: list[tuple[str, str]] = []

    class Taken:
        def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
            events.append((kind, device))

    parts = {name: statistics_of(half) for name, half in devices().items()}
    assert parts["c"].means is not None
    loud = {**parts, "c": replace(parts["c"], means=parts["c"].means.astype(np.float32) * 500)}
    result, counted, left_out_of_it = merge_moments(loud, MergeRules(robust="gross"), Taken())  # type: ignore[arg-type]
    assert ("summary-left-out", "c") in events
    assert counted == {"a": [0, 1], "b": [1, 2, 3]}
    assert list(left_out_of_it) == ["c"]
    assert result is not None
    assert np.array_equal(result.covariance, merge(from_wire(parts[name]) for name in "ab").covariance)


def test_statistics_with_other_class_order_give_same_merge() -> None:
    """Another implementation of the wire may send its classes in whatever order."""
    parts = {name: statistics_of(half) for name, half in devices().items()}
    for name, order in (("a", [2, 0, 1]), ("b", [1, 2, 0])):
        sent = parts[name]
        assert sent.counts is not None
        assert sent.means is not None
        order = order[: len(sent.labels)] if len(sent.labels) == 3 else list(range(len(sent.labels)))[::-1]
        foreign = replace(
            sent, labels=[sent.labels[item] for item in order], counts=sent.counts[order], means=sent.means[order]
        )
        assert foreign.labels != sent.labels
        result, counted, _ = merge_moments({**parts, name: foreign}, MergeRules(robust="gross"), Silent())  # type: ignore[arg-type]
        expected, counted_before, _ = merge_moments(parts, MergeRules(robust="gross"), Silent())  # type: ignore[arg-type]
        assert result is not None
        assert expected is not None
        assert counted == counted_before
        for field in ("labels", "counts", "means", "covariance", "df"):
            assert np.array_equal(getattr(result, field), getattr(expected, field)), field


class Silent:
    """Notes that nobody reads."""

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None: ...


def test_capped_device_weighs_less_in_covariance_and_degrees_too() -> None:
    """One class, means at 0, 0 and 0: 11, 11 and 1,001 rows of variances 1, 1 and 9, of which 33 count.

    df = 10 + 10 + 32 + 2 (one mean instead of three); the covariance is (10 x 1 + 10 x 1 + 32 x 9) / 54 = 308 / 54.
    """

    def sent(rows: int, variance: float) -> SharedStatistics:
        return SharedStatistics(
            labels=[0],
            counts=np.array([rows], np.int32),
            means=np.zeros((1, 2), np.float16),
            directions=None,
            steps=None,
            variances=np.full(2, variance, np.float16),
            df=np.array(rows - 1, np.int32),
        )

    parts = {"a": sent(11, 1), "b": sent(11, 1), "c": sent(1001, 9)}
    result, _, _ = merge_moments(parts, MergeRules(robust="off", count_cap=3), Silent())  # type: ignore[arg-type]
    assert result is not None
    assert result.counts.tolist() == [11 + 11 + 33]
    assert result.df == 54
    np.testing.assert_allclose(result.covariance, np.diag([308 / 54, 308 / 54]), rtol=1e-12)


def test_a_capped_device_loses_a_degree_for_each_class() -> None:
    """Two classes of means 0: 12, 12 and 1,200 rows of variances 1, 1 and 9, of which 36 count.

    df = 10 + 10 + 34 + 4 (two means instead of six); the covariance is (10 x 1 + 10 x 1 + 34 x 9) / 58 = 326 / 58.
    """
    parts = {
        name: SharedStatistics(
            labels=[0, 1],
            counts=np.array([rows, rows], np.int32),
            means=np.zeros((2, 2), np.float16),
            directions=None,
            steps=None,
            variances=np.full(2, variance, np.float16),
            df=np.array(2 * rows - 2, np.int32),
        )
        for name, rows, variance in (("a", 6, 1), ("b", 6, 1), ("c", 600, 9))
    }
    result, _, _ = merge_moments(parts, MergeRules(robust="off", count_cap=3), Silent())  # type: ignore[arg-type]
    assert result is not None
    assert result.counts.tolist() == [6 + 6 + 18] * 2
    assert result.df == 58
    np.testing.assert_allclose(result.covariance, np.diag([326 / 58, 326 / 58]), rtol=1e-12)


def test_a_cap_bounds_what_one_device_counts_for() -> None:
    halves = {
        "a": make_device([10, 10, 0, 0]),
        "b": make_device([10, 10, 0, 0], 2),
        "c": make_device([300, 60, 0, 0], 3),
    }
    played = Rounds(make_server(count_cap=3.0), halves).play()
    assert space_of(played).counts.tolist() == [10 + 10 + 50, 10 + 10 + 10]
    assert [text for kind, text in played.events if kind == "rows-capped"] == [
        "c sent statistics of 360 rows, which count as 60: the limit is 3 times the median device's rows"
    ]


def left_out(label: int, right: int, count: int) -> Metrics:
    """What a device says of its rows of one class."""
    by_class = [ClassCount(label=label, sum=right, count=count)]
    return Metrics(metrics=[Metric(name=LEAVE_ONE_OUT, split="train", sum=right, count=count, by_class=by_class)])


def test_device_reports_decide_whether_class_is_an_event() -> None:
    played = fleet("ab")
    played.metrics = {"a": left_out(label=0, right=1, count=20), "b": left_out(label=1, right=9, count=9)}
    played.play()
    texts = [text for kind, text in played.events if kind == "class-not-recognised"]
    assert len(texts) == 1
    assert texts[0].startswith("class 0: leave-one-out recognises 0.050 of its rows, chance is 0.250")


def test_unsent_rows_of_device_report_nothing_about_class() -> None:
    """Device a has three samples of class 2, fewer than min_samples: that these are not recognised says little."""
    played = fleet("ab")
    played.metrics = {"a": left_out(label=2, right=0, count=3)}
    played.play()
    assert "class-not-recognised" not in {kind for kind, _ in played.events}
