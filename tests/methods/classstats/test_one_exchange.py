"""One exchange of class statistics: both halves, what changes the merge, the answers, guards, and what is refused."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from support.class_statistics_fleet import CLASSES, CPU, SHAPE, Rounds, rows_of
from torch import nn

from fleetdistill import COLUMNS, Device, Event
from fleetdistill.device import Step
from fleetdistill.errors import CannotAnswer, ConfigurationError, DataError, QuorumNotReached, WireError
from fleetdistill.knowledge import (
    GENERAL,
    OWN,
    PERSONAL,
    Array,
    ClassCount,
    ClassSpace,
    Metric,
    Metrics,
    SharedStatistics,
)
from fleetdistill.methods import config_class, device_class
from fleetdistill.methods.base import Answer, Ask, Local
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.class_answers import (
    LEAVE_ONE_OUT,
    OWN_KEPT,
    OWN_LEAVE_ONE_OUT,
    PERSONAL_LEAVE_ONE_OUT,
    class_answers,
)
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.device import ClassStatsDevice
from fleetdistill.methods.classstats.exchange import SpacePlan, check_space
from fleetdistill.methods.classstats.projection import project
from fleetdistill.methods.classstats.shared_statistics import from_wire, merge, moments_of, to_wire
from fleetdistill.methods.classstats.space_model import SpaceModel, make_predictor
from fleetdistill.methods.classstats.space_training import draw_images, draw_in_space
from fleetdistill.models import PREDICTORS, build_model
from fleetdistill.models.scattering import Scattering
from fleetdistill.seeds import derive_seed
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.model import check_local_model
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import ModelSection, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.classstats.averaged import AveragedServer
from fleetdistill_server.methods.classstats.merge import Rules, merged_moments
from fleetdistill_server.methods.classstats.server import ClassStatsServer
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.simulation.links.links import DriveDevices
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

SMALL: dict[str, Any] = {"rows_per_direction": 2}


def config_of(**settings: Any) -> ClassStatsConfig:
    return ClassStatsConfig.from_settings({**SMALL, **settings}).for_classes(CLASSES)


def make_server(shape: tuple[int, ...] = SHAPE, extractor: str = "scattering", **settings: Any) -> ClassStatsServer:
    context = MethodContext(
        classes=CLASSES,
        input_shape=shape,
        models=ModelSection(extractor=extractor, server="digits_server"),
        torch_device=CPU,
        seed=3,
    )
    return ClassStatsServer(config_of(**settings), context)


def images_of(counts: Sequence[int], seed: int) -> TensorData:
    """Rows whose label can be seen, as images in [0, 1]."""
    rows = rows_of(counts, seed)
    return TensorData(rows.inputs / 1.2, rows.labels)


def device_on(data: TensorData, model: str = "digits_linear", **settings: Any) -> ClassStatsDevice:
    torch.manual_seed(1)
    module = build_model(model, classes=CLASSES)
    local = Local(model=module, taps=check_local_model(module), data=data, classes=CLASSES, torch_device=CPU)
    return ClassStatsDevice(config_of(**settings), local)


def make_device(counts: Sequence[int], seed: int = 1, **settings: Any) -> ClassStatsDevice:
    return device_on(images_of(counts, seed), **settings)


def devices(**settings: Any) -> dict[str, ClassStatsDevice]:
    return {
        "a": make_device([20, 12, 3, 0], seed=1, **settings),
        "b": make_device([0, 9, 14, 8], seed=2, **settings),
        "c": make_device([6, 0, 7, 9], seed=3, **settings),
    }


def fleet(names: str = "ab", **settings: Any) -> Rounds:
    chosen = {name: half for name, half in devices(**settings).items() if name in names}
    return Rounds(make_server(**settings), chosen)


def space_of(played: Rounds) -> ClassSpace:
    """What the server has sent last."""
    sent = [parts["space"] for step, _, parts in played.asked if step == "learn" and "space" in parts]
    assert isinstance(sent[-1], ClassSpace)
    return sent[-1]


def equal(one: ClassSpace, other: ClassSpace) -> bool:
    return all(np.array_equal(mine, its) for mine, its in zip(vars(one).values(), vars(other).values(), strict=True))


def statistics_of(half: ClassStatsDevice) -> SharedStatistics:
    sent = half.handle(Ask(round=1, step="summarise", seed=1)).parts["statistics"]
    found = decode(encode({"statistics": sent}))["statistics"]
    assert isinstance(found, SharedStatistics)
    return found


# --- settings and forms


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"features": "pixels"}, "unknown features 'pixels', expected one of scattering, model, averaged"),
        ({"covariance": "full"}, "unknown covariance 'full', expected one of shared, class"),
        ({"predictor": "forest"}, "unknown predictor 'forest', expected one of closed_form, trained"),
        ({"own_network": "sold"}, "unknown own_network 'sold', expected one of kept, taught"),
        ({"dimensions": 7}, r"dimensions must be 0 or in \[8, 2048\], got 7"),
        ({"dimensions": 2049}, r"dimensions must be 0 or in \[8, 2048\], got 2049"),
        ({"rank": 513}, r"rank must be in \[0, 512\], got 513"),
        ({"rank": -1}, r"rank must be in \[0, 512\], got -1"),
        ({"rows_per_direction": 1}, "rows_per_direction must be >= 2, got 1"),
        ({"min_samples": 1}, "min_samples must be >= 2, got 1"),
        ({"shrinkage": 1.0}, "shrinkage must be >= 0 and < 1, got 1.0"),
        ({"shrinkage": "much"}, "unknown shrinkage 'much', expected one of rule"),
        ({"count_cap": 0.5}, "count_cap must be >= 1, got 0.5"),
        ({"predictor_steps": 0}, "predictor_steps must be >= 1"),
        ({"own_network_epochs": 0}, "own_network_epochs must be >= 1"),
        ({"own_network_rate": 0.0}, "own_network_rate must be > 0"),
        ({"drawn_images": -1}, "drawn_images must be >= 0"),
        (
            {"own_network": "taught", "features": "model"},
            "draws images through the scattering, and features is 'model'",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        config_of(**settings)


@pytest.mark.parametrize("chosen", [{"features": "averaged"}, {"covariance": "class"}])
def test_settings_choose_the_other_form_on_both_sides(chosen: dict[str, str]) -> None:
    cls = config_class("classstats", chosen)
    assert cls is AveragedConfig
    config = cls.from_settings(chosen)
    assert (config.features, config.covariance) == ("averaged", "class")
    assert device_class("classstats", config) is AveragedDevice
    assert server_class("classstats", config) is AveragedServer


def test_the_usual_form_is_one_exchange() -> None:
    config = config_class("classstats")()
    assert isinstance(config, ClassStatsConfig)
    assert device_class("classstats", config) is ClassStatsDevice
    assert server_class("classstats", config) is ClassStatsServer


@pytest.mark.parametrize(
    "settings",
    [
        {"features": "scattering", "covariance": "class"},
        {"features": "averaged", "covariance": "shared"},
    ],
)
def test_features_and_covariance_of_two_forms_do_not_go_together(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="does not go with covariance"):
        config_class("classstats", settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"extractor_rounds": 3}, r'extractor_rounds: only the form with features = "averaged" has it; set that'),
        ({"drawn_rows": 3, "rank": 4}, r'drawn_rows: only the form with features = "averaged" has it'),
        (
            {"features": "averaged", "predictor": "trained", "dimensions": 64},
            r'dimensions, predictor: only the form with features = "scattering" or "model" has it',
        ),
        ({"extractor_round": 3}, "extractor_round: unknown setting"),
    ],
)
def test_a_setting_of_the_other_form_is_refused_with_the_form_that_has_it(given: dict[str, Any], says: str) -> None:
    values: dict[str, Any] = {
        "run": {"name": "r", "method": "classstats"},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": given,
    }
    with pytest.raises(ConfigurationError, match=rf"\[method\] {says}"):
        run_config(values)


@pytest.mark.parametrize("shape", [(1, 7, 8), (16,)])
def test_a_run_of_inputs_that_scattering_is_not_for_is_refused_with_the_way_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"\[contract\] input_shape: .*features = 'model'"):
        make_server(shape)


@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_images_outside_0_to_1_are_refused_with_the_way_out(factor: float) -> None:
    data = images_of([5, 5, 5, 5], 1)
    with pytest.raises(DataError, match=r"images in \[0, 1\], got .*features = 'model'"):
        device_on(TensorData(data.inputs * factor, data.labels))


# --- one exchange


def test_one_round_is_all_and_everybody_has_the_space() -> None:
    played = fleet("abc").play()
    assert played.steps() == [(step, name) for step in ("summarise", "learn") for name in "abc"]
    for half in played.halves.values():
        assert set(half.variants()) == {GENERAL, PERSONAL}
    assert played.play().steps() == []


def test_the_space_is_that_of_all_rows_together_up_to_encoding() -> None:
    played = fleet("abc", rank=512).play()
    data = [half.local.data for half in played.halves.values()]
    big = [np.isin(one.labels, np.flatnonzero(np.bincount(one.labels) >= 5)) for one in data]
    inputs = torch.cat([one.inputs[torch.from_numpy(kept)] for one, kept in zip(data, big, strict=True)])
    labels = np.concatenate([one.labels.numpy()[kept] for one, kept in zip(data, big, strict=True)])
    rows = project(extract(Scattering(SHAPE), inputs).flatten(1).numpy(), 256)
    whole = moments_of(rows, labels)
    expected = make_space(whole, shrinkage_rule(256, whole.df))
    space = space_of(played)
    assert space.counts.tolist() == whole.counts.tolist()
    assert int(space.df) == whole.df
    wanted = logits(expected, coordinates(expected, rows), CLASSES)
    found = logits(space, coordinates(space, rows), CLASSES)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.97


def test_all_devices_and_the_server_give_the_same_general_answer() -> None:
    played = fleet("abc").play()
    inputs = images_of([4, 4, 4, 4], 9).inputs
    server = played.server.global_model()
    assert server is not None
    expected = extract(server, inputs)
    for half in played.halves.values():
        assert_allclose(extract(half.variants()[GENERAL], inputs), expected, atol=1e-5)
    space = space_of(played)
    rows = project(extract(Scattering(SHAPE), inputs).flatten(1).numpy(), 256)
    assert_allclose(expected, logits(space, coordinates(space, rows), CLASSES), atol=2e-2)


def test_a_device_learns_classes_that_it_has_never_seen() -> None:
    played = fleet("ab").play()
    unseen = images_of([0, 0, 0, 12], 9)
    found = extract(played.halves["a"].variants()[GENERAL], unseen.inputs).argmax(dim=1)
    assert (found == 3).float().mean() > 0.9


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
    assert sum(count for count in seen if count > 1) == 24 + 26


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
    assert played.server.is_due(present)
    played.play()
    assert not played.server.is_due(present)
    assert not played.server.is_due({"a": "", "b": ""})
    assert played.server.is_due(present)
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


def test_a_device_that_does_not_hold_the_space_declines_a_plan_without_it() -> None:
    half = make_device([9, 9, 0, 0])
    plan = SpacePlan(merge=7, counted=False, draw_seed=1).to_wire()
    with pytest.raises(CannotAnswer, match="this device has none; the server sends it with the next ask"):
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
    assert ("class-of-one-device", "classes [0, 2, 3] are known from one device each; they are used") in played.events


def test_few_rows_are_an_event_and_the_shrinkage_goes_to_a_half() -> None:
    played = fleet("ab").play()
    assert any(kind == "few-rows" for kind, _ in played.events)
    assert float(space_of(played).shrinkage) == 0.5


def test_one_merged_class_makes_no_space_and_an_event() -> None:
    halves = {"a": make_device([9, 0, 0, 0]), "b": make_device([8, 0, 0, 0], seed=2)}
    played = Rounds(make_server(), halves).play()
    assert played.steps() == [("summarise", "a"), ("summarise", "b")]
    assert any(kind == "no-class-space" and "two classes" in text for kind, text in played.events)


def test_a_space_that_does_not_fit_the_wire_is_an_event_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_device_without_a_large_enough_class_gets_the_space_all_the_same() -> None:
    halves = {**devices(), "small": make_device([2, 2, 2, 2], seed=4)}
    played = Rounds(make_server(), halves).play()
    sent = next(parts for step, name, parts in played.answered if (step, name) == ("summarise", "small"))
    assert sent["statistics"].labels == []  # type: ignore[attr-defined]
    assert played.notes_of["summarise", "small"]["classes_too_small"] == 4
    assert [played.notes_of["summarise", name]["classes_too_small"] for name in devices()] == [0] * 3
    text = "small has no class of 5 samples or more (min_samples); nothing of its rows is merged"
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
    found, counted, left_out_of_it = merged_moments(loud, Rules(robust="gross"), Taken())  # type: ignore[arg-type]
    assert ("summary-left-out", "c") in events
    assert counted == {"a": [0, 1], "b": [1, 2, 3]}
    assert list(left_out_of_it) == ["c"]
    assert found is not None
    assert np.array_equal(found.covariance, merge(from_wire(parts[name]) for name in "ab").covariance)


def test_a_cap_bounds_what_one_device_counts_for() -> None:
    halves = {
        "a": make_device([10, 10, 0, 0]),
        "b": make_device([10, 10, 0, 0], 2),
        "c": make_device([300, 60, 0, 0], 3),
    }
    played = Rounds(make_server(count_cap=3.0), halves).play()
    assert space_of(played).counts.tolist() == [10 + 10 + 50, 10 + 10 + 10]
    assert [text for kind, text in played.events if kind == "rows-capped"] == [
        "c has sent statistics of 360 rows; they count as 60, at most 3 times the median device's"
    ]


def left_out(label: int, right: int, count: int) -> Metrics:
    """What a device says of its rows of one class."""
    by_class = [ClassCount(label=label, sum=right, count=count)]
    return Metrics(metrics=[Metric(name=LEAVE_ONE_OUT, split="train", sum=right, count=count, by_class=by_class)])


def test_what_devices_say_of_a_class_decides_whether_it_is_an_event() -> None:
    played = fleet("ab")
    played.metrics = {"a": left_out(label=0, right=1, count=20), "b": left_out(label=1, right=9, count=9)}
    played.play()
    texts = [text for kind, text in played.events if kind == "class-not-recognised"]
    assert len(texts) == 1
    assert texts[0].startswith("class 0: 0.050 of its rows are recognised when left out, chance is 0.250")


def test_of_rows_that_a_device_has_not_sent_nothing_is_said_of_a_class() -> None:
    """Device a has three samples of class 2, fewer than min_samples: that these are not recognised says little."""
    played = fleet("ab")
    played.metrics = {"a": left_out(label=2, right=0, count=3)}
    played.play()
    assert "class-not-recognised" not in {kind for kind, _ in played.events}


# --- the answers


def test_the_personal_answer_weighs_classes_as_the_device_has_them() -> None:
    played = fleet("ab", own_statistics_guard=False).play()
    half = played.halves["a"]
    inputs = images_of([3, 3, 3, 3], 9).inputs
    general, personal = (extract(half.variants()[name], inputs).double() for name in (GENERAL, PERSONAL))
    counts = np.array([20, 12, 3, 0]) + 0.5
    prior = torch.from_numpy(np.log(counts / counts.sum()))
    found = (personal - prior).log_softmax(dim=1)
    fits = [torch.allclose((general / one).log_softmax(dim=1), found, atol=1e-3) for one in (1, 1.5, 2, 3, 4, 6, 8)]
    assert sum(fits) == 1


def fleet_of_two_kinds() -> tuple[ClassSpace, Array, Array]:
    """A fleet whose class 0 lies elsewhere than the device's own rows of it."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 60)
    rows = generator.standard_normal((120, 4)) + np.array([[0, 0, 0, 0], [3, 0, 0, 0]])[labels]
    own = generator.standard_normal((40, 4)) + np.array([[0, 5, 0, 0], [0, 0, 5, 0]])[np.repeat([0, 1], 20)]
    return make_space(moments_of(rows, labels), 0.05), own, np.repeat([0, 1], 20)


def test_a_device_of_another_kind_keeps_its_own_statistics() -> None:
    space, rows, labels = fleet_of_two_kinds()
    found = class_answers(space, rows, labels, (), 2, moments_of(rows, labels))
    assert found.own_kept
    assert found.personal.space is not space
    figures = {one.name: one.sum / one.count for one in found.figures}
    assert figures[OWN_LEAVE_ONE_OUT] > figures[PERSONAL_LEAVE_ONE_OUT]
    assert figures[OWN_KEPT] == 1
    without = class_answers(space, rows, labels, (), 2, None)
    assert without.personal.space is space
    assert {one.name for one in without.figures} == {LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT}


def test_a_device_of_one_class_has_no_statistics_of_its_own_to_keep() -> None:
    space, rows, _ = fleet_of_two_kinds()
    labels = np.zeros(40, int)
    found = class_answers(space, rows, labels, (0,), 2, moments_of(rows, labels))
    assert not found.own_kept
    assert OWN_LEAVE_ONE_OUT not in {one.name for one in found.figures}


def test_leave_one_out_predicts_the_accuracy_on_unseen_rows() -> None:
    """On noisy rows of 4 classes: within five points of the accuracy on 2,000 rows that nobody has."""
    generator = np.random.default_rng(4)
    centres = generator.standard_normal((4, 20)) * 0.6
    labels, unseen = np.repeat(np.arange(4), 40), np.repeat(np.arange(4), 500)
    rows, others = (generator.standard_normal((len(one), 20)) + centres[one] for one in (labels, unseen))
    parts = [moments_of(rows[start::2], labels[start::2]) for start in (0, 1)]
    merged = merge(parts)
    space = make_space(merged, shrinkage_rule(20, merged.df))
    found = class_answers(space, rows[::2], labels[::2], range(4), 4, None).figures[0]
    accuracy = (logits(space, coordinates(space, others), 4).argmax(axis=1) == unseen).mean()
    naive = (logits(space, coordinates(space, rows), 4).argmax(axis=1) == labels).mean()
    assert found.sum / found.count == pytest.approx(accuracy, abs=0.05)
    assert found.sum / found.count < naive


# --- a predictor of the device's own, and the app's own network


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictors_of_the_table_read_coordinates(name: str) -> None:
    made = make_predictor(name, 3, 4)
    assert made(torch.rand(5, 3)).shape == (5, 4)
    assert sum(isinstance(one, nn.Linear) for one in made.modules()) == len(PREDICTORS[name]) + 1


def test_a_predictor_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown predictor 'tree', expected one of space_linear"):
        make_predictor("tree", 3, 4)
    with pytest.raises(ConfigurationError, match=r"gives \[2, 5\] for 2 rows of 3, expected \[2, 4\]"):
        make_predictor(lambda inputs, classes: nn.Linear(inputs, 5), 3, 4)


def test_drawn_rows_are_normal_around_the_centres_and_the_same_everywhere() -> None:
    space, _, _ = fleet_of_two_kinds()
    rows, labels = draw_in_space(space, 4000, seed=5)
    assert labels.tolist() == [0] * 4000 + [1] * 4000
    for label in (0, 1):
        of_class = rows[labels == label]
        assert_allclose(of_class.mean(axis=0), space.centres[label], atol=0.08)
        assert_allclose(of_class.std(axis=0), 1, atol=0.05)
    assert np.array_equal(draw_in_space(space, 4000, seed=5)[0], rows)


def test_a_trained_predictor_of_the_apps_own_making_is_both_answers() -> None:
    settings = {"predictor": "trained", "predictor_steps": 60}
    played = fleet("ab", **settings)
    for half in played.halves.values():
        half.local = replace(half.local, predictor=lambda inputs, classes: nn.Sequential(nn.Linear(inputs, classes)))
    played.play()
    half = played.halves["a"]
    assert half.trained is not None
    assert half.trained.steps >= 60
    general = half.variants()[GENERAL]
    assert isinstance(general, SpaceModel)
    assert isinstance(general.above.predictor, nn.Sequential)
    rows = images_of([0, 0, 0, 10], 9)
    assert (extract(general, rows.inputs).argmax(dim=1) == 3).float().mean() > 0.8


def test_the_apps_network_is_kept_unless_it_is_to_be_taught() -> None:
    played = fleet("ab").play()
    assert OWN not in played.halves["a"].variants()
    taught = fleet("ab", own_network="taught", own_network_epochs=15, drawn_images=60).play()
    half = taught.halves["a"]
    assert half.variants()[OWN] is half.local.model
    unseen = images_of([10, 10, 10, 10], 9)
    found = extract(half.local.model, unseen.inputs).argmax(dim=1)
    assert (found == unseen.labels).float().mean() > 0.7  # with classes that it has few or no rows of


def test_drawn_images_are_seen_where_rows_of_the_classes_lie() -> None:
    played = fleet("abc").play()
    space, general = space_of(played), played.halves["a"].variants()[GENERAL]
    assert isinstance(general, SpaceModel)
    own = played.halves["a"].local.data.inputs
    images = draw_images(general.eval(), space, own, 40, seed=3)
    assert images.shape == (40, *SHAPE)
    assert 0 <= images.min() <= images.max() <= 1
    counts = extract(general, images).argmax(dim=1).bincount(minlength=CLASSES)
    assert (counts >= 4).all()
    assert len(draw_images(general, space, own, 0, seed=3)) == 0


# --- a hostile or broken server


def spaces() -> Mapping[str, dict[str, Any]]:
    nan = np.full((256, 3), np.nan, np.float16)
    return {
        "has shapes": {"directions": np.zeros((255, 3), np.float16)},
        "has shapes .* directions": {
            "directions": np.zeros((256, 4), np.float16),
            "origin": np.zeros(4, np.float16),
            "centres": np.zeros((4, 4), np.float16),
        },
        "has classes": {"labels": [0, 1, 2, 9]},
        "has classes .*1, 1": {"labels": [0, 1, 1, 2]},
        "not finite": {"directions": nan},
        "shrinkage 1,": {"shrinkage": np.array(1.0)},
        "outside -1,": {"outside": np.array(-1.0)},
        "df 0;": {"df": np.array(0)},
        "without samples": {"counts": np.array([0, 1, 2, 3], np.int32)},
    }


@pytest.mark.parametrize("says", spaces())
def test_a_space_that_cannot_be_is_a_wire_error_and_the_device_keeps_what_it_has(says: str) -> None:
    played = fleet("abc").play()
    half, good = played.halves["a"], space_of(played)
    check_space(good, 256, CLASSES)
    before = extract(half.variants()[GENERAL], images_of([2, 2, 2, 2], 9).inputs)
    plan = SpacePlan(merge=9, counted=True, draw_seed=1).to_wire()
    with pytest.raises(WireError, match=says):
        half.handle(Ask(round=2, step="learn", seed=1, parts={"space": replace(good, **spaces()[says]), "plan": plan}))
    assert torch.equal(extract(half.variants()[GENERAL], images_of([2, 2, 2, 2], 9).inputs), before)


@pytest.mark.parametrize("values", [{}, {"merge": "x", "counted": True, "draw_seed": 1}, {"merge": 1, "counted": 1}])
def test_a_plan_that_cannot_be_read_is_a_wire_error(values: dict[str, Any]) -> None:
    half = make_device([9, 9, 0, 0])
    plan = SpacePlan(merge=1, counted=True, draw_seed=1).to_wire()
    with pytest.raises(WireError, match="the plan's"):
        half.handle(Ask(round=1, step="learn", seed=1, parts={"plan": type(plan)(values=values)}))


# --- over the SDK: files, figures, consent, features of the app's own


def run_of(store: Store, **method: Any) -> Any:
    values = {
        "run": {"name": "one", "method": "classstats", "rounds": 1, "min_devices": 2},
        "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
        "method": {**SMALL, **method},
        "server": {"torch_device": "cpu"},
    }
    return run_config(values)


def app_model() -> torch.nn.Module:
    return build_model("digits_linear", classes=CLASSES)


def apps(
    api: DeviceApi, folder: Path, events: list[Event], models: Sequence[Any] = (app_model, app_model), **changes: Any
) -> list[Device]:
    made = []
    for number, counts in enumerate(([20, 12, 6, 0], [0, 9, 14, 8])):
        data = images_of(counts, number + 1)
        made.append(
            Device(
                server=MemoryLink(api),
                model=models[number],
                data=(data.inputs, data.labels),
                state_dir=folder / f"d{number}",
                device_id=f"d{number}",
                on_event=events.append,
                **changes,
            )
        )
    return made


def play(store: Store, folder: Path, events: list[Event], method: dict[str, Any], **changes: Any) -> list[Device]:
    found = apps(DeviceApi(store), folder, events, **changes)
    asyncio.run(Engine(store, run_of(store, **method), DriveDevices(found, lambda: None)).run())
    for device in found:
        while device.step(0.0) is not Step.FINISHED:
            pass
    return found


def onnx_logits(file: Path, inputs: Array) -> Array:
    return np.asarray(onnxruntime.InferenceSession(str(file)).run(["logits"], {"input": inputs})[0])


def test_an_app_has_its_own_network_and_both_answers_as_files_from_image_to_class(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    unseen = images_of([4, 4, 4, 4], 9).inputs
    for device in play(store, tmp_path, events, {}):
        assert set(device.models) == {OWN, GENERAL, PERSONAL}
        assert device.model is device.models[GENERAL]
        for name in (OWN, GENERAL, PERSONAL):
            with torch.no_grad():
                expected = device.models[name](unseen).numpy()
            found = onnx_logits(tmp_path / device.device_id / f"{name}.onnx", unseen.numpy())
            assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
        whole = (tmp_path / device.device_id / "model.onnx").read_bytes()
        assert whole == (tmp_path / device.device_id / "general.onnx").read_bytes()
        device.close()
    store.close()


@pytest.mark.parametrize("judged", [False, True], ids=["no validation data", "validation data"])
def test_the_network_that_the_app_gave_is_not_trained(tmp_path: Path, judged: bool) -> None:
    """Its extractor becomes the run's where no data decide, as the SDK's page says; nothing else of it changes."""
    store, events = Store.in_memory(), list[Event]()
    rows = images_of([6, 6, 6, 6], 5)
    config = run_config(
        {
            "run": {"name": "one", "method": "classstats", "rounds": 1, "min_devices": 2},
            "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
            "model": {"extractor": "digits_extractor"},
            "method": {"features": "model"},
            "server": {"torch_device": "cpu"},
        }
    )
    changes = {"validation_data": (rows.inputs, rows.labels)} if judged else {}
    given = [app_model(), app_model()]
    models = [copy.deepcopy(model) for model in given]
    found = apps(DeviceApi(store), tmp_path, events, models, export_onnx="never", **changes)
    asyncio.run(Engine(store, config, DriveDevices(found, lambda: None)).run())
    for device, model in zip(found, given, strict=True):
        own, before = device.models[OWN].state_dict(), model.state_dict()
        changed = {name for name, tensor in own.items() if not torch.equal(tensor, before[name])}
        assert changed == (set() if judged else {"stages.stem.0.weight"}), "batch-norm starts alike everywhere"
        device.close()
    store.close()


def test_what_is_delivered_beside_the_apps_network_is_not_called_its_replacement(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    for device in play(store, tmp_path, events, {}, export_onnx="never"):
        device.close()
    store.close()
    texts = {event.text for event in events if event.kind == "delivered"}
    assert texts == {"round 1: the answer in use is 'general'"}


def test_both_answers_are_there_after_a_restart(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    unseen = images_of([4, 4, 4, 4], 9).inputs
    before = []
    for device in play(store, tmp_path, events, {}):
        before.append({name: extract(model, unseen) for name, model in device.models.items()})
        device.close()
    for device, expected in zip(apps(DeviceApi(store), tmp_path, events), before, strict=True):
        assert device.models.keys() == expected.keys()
        for name, model in device.models.items():
            assert torch.equal(extract(model, unseen), expected[name])
        device.close()
    store.close()


def test_with_validation_data_an_app_keeps_its_network_where_that_is_better(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    nonsense = images_of([6, 6, 6, 6], 5)
    shuffled = (nonsense.inputs, torch.zeros(24, dtype=torch.int64))  # only an answer that always says 0 is right

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.bias = nn.Identity(), nn.Parameter(torch.tensor([9.0, 0.0, 0.0, 0.0]))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.extractor(x)

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(len(x), -1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.predict(x)

    models = (Zero, app_model)
    found = apps(DeviceApi(store), tmp_path, events, models, validation_data=shuffled, export_onnx="never")
    asyncio.run(Engine(store, run_of(store), DriveDevices(found, lambda: None)).run())
    assert isinstance(found[0].model, Zero)
    assert "kept" in {event.kind for event in events}
    for device in found:
        device.close()
    store.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_leave_one_out_reaches_the_server_only_where_the_app_allows_metrics(tmp_path: Path, allowed: bool) -> None:
    store, events = Store.in_memory(), list[Event]()
    allow = tuple(one for one in COLUMNS if allowed or one != "metrics")
    for device in play(store, tmp_path, events, {}, allow=allow, export_onnx="never"):
        device.close()
    names = (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT, OWN_KEPT)
    found = {name: {row["device"] for row in store.history.figures("one", name, "train")} for name in names}
    assert found == dict.fromkeys(names, {"d0", "d1"} if allowed else set())
    assert views.run(store, "one") is not None
    store.close()


def test_vectors_take_part_behind_the_identity(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), 12)
    rows = (generator.standard_normal((48, 16)) + 3 * generator.random((CLASSES, 16))[labels]).astype(np.float32)
    store = Store.in_memory()
    values = {
        "run": {"name": "vectors", "method": "classstats", "rounds": 1},
        "contract": {"classes": CLASSES, "input_shape": [16]},
        "model": {"extractor": "identity"},
        "method": {"features": "model"},
        "server": {"torch_device": "cpu"},
    }

    def model() -> nn.Module:
        from fleetdistill.training.model import split_sequential

        return split_sequential(nn.Sequential(nn.Identity(), nn.Linear(16, CLASSES)), after=1)

    api = DeviceApi(store)
    found = [
        Device(
            server=MemoryLink(api),
            model=model,
            data=(rows[part::2], labels[part::2]),
            state_dir=tmp_path / f"d{part}",
            device_id=f"d{part}",
        )
        for part in (0, 1)
    ]
    asyncio.run(Engine(store, run_config(values), DriveDevices(found, lambda: None)).run())
    merged = merge(moments_of(rows[part::2], labels[part::2], 5) for part in (0, 1))
    space = make_space(merged, shrinkage_rule(16, merged.df))
    wanted = logits(space, coordinates(space, rows), CLASSES).argmax(axis=1)
    for device in found:
        assert (extract(device.model, torch.from_numpy(rows)).argmax(dim=1).numpy() == wanted).mean() > 0.95
        device.close()
    store.close()


def test_the_draw_seed_follows_from_the_space_alone() -> None:
    played = fleet("ab").play()
    plans = [parts["plan"] for step, _, parts in played.asked if step == "learn"]
    values = plans[0].values  # type: ignore[attr-defined]
    assert values["draw_seed"] == derive_seed(3, "space", values["merge"])
    assert plans[0] == plans[1]


def test_what_a_device_sends_is_what_arrives_in_the_merge() -> None:
    half = make_device([20, 12, 3, 0])
    arrived = from_wire(statistics_of(half))
    assert arrived.labels == (0, 1)
    assert arrived.counts.tolist() == [20, 12]
    assert arrived.df == 30


@pytest.mark.parametrize("rows_each", [5, 8, 20])
def test_leave_one_out_of_few_directions_is_no_pessimist(rows_each: int) -> None:
    """Small devices send few directions; what these hold of a row, and no more, is taken out of the covariance."""
    generator, classes, size, devices_ = np.random.default_rng(6), 4, 60, 3
    centres = generator.standard_normal((classes, size))
    labels, unseen = np.repeat(np.arange(classes), rows_each), np.repeat(np.arange(classes), 400)
    parts = [generator.standard_normal((len(labels), size)) + centres[labels] for _ in range(devices_)]
    moments = [moments_of(rows, labels) for rows in parts]
    merged = merge(from_wire(to_wire(one, 128, 15)) for one in moments)
    space = make_space(merged, shrinkage_rule(size, merged.df))
    others = generator.standard_normal((len(unseen), size)) + centres[unseen]
    accuracy = (logits(space, coordinates(space, others), classes).argmax(axis=1) == unseen).mean()
    found = class_answers(space, parts[0], labels, range(classes), classes, moments[0], 15)
    assert found.figures[0].sum / found.figures[0].count > accuracy - 0.1
    assert not found.own_kept
