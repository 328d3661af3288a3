"""Class statistics' two halves, what leaves a device, what it learns, guards, and the two answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from rich.console import Console
from support.class_statistics_fleet import (
    CLASSES,
    CPU,
    Rounds,
    config_of,
    copied,
    equal,
    fleet,
    make_device,
    make_server,
    rows_of,
)
from support.fleets import RUN, RUNS, SMALL, prepare, run_in_memory
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill import Device, Event
from fleetdistill.device import Step
from fleetdistill.errors import ConfigurationError, KnowledgeError, QuorumNotReached, WireError
from fleetdistill.knowledge import (
    GENERAL,
    PERSONAL,
    Array,
    ClassStatistics,
    ModelParameters,
    Parts,
    Plan,
    SoftPredictions,
)
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    draw_classes,
    from_wire,
    merge,
    shrink,
    summarise,
    to_wire,
)
from fleetdistill.methods.classstats.kept_statistics import unpacked
from fleetdistill.methods.classstats.lesson import Lesson
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.model import check_local_model
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.methods.classstats.own_predictor import least_recognised
from fleetdistill_server.methods.traffic import declared_parts
from fleetdistill_server.simulation.fleet import simulate
from fleetdistill_server.simulation.links.links import DriveDevices
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.simulation.report.table import report_table
from fleetdistill_server.simulation.spec.device import load_arrays
from fleetdistill_server.simulation.spec.device import make_device as make_simulated
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views


def lesson_of(seed: int) -> Lesson:
    return Lesson(draw_seed=seed, nonnegative=True, merge=1, learning_rate=0.01)


# --- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 65}, r"rank must be in \[0, 64\], got 65"),
        ({"rank": -1}, r"rank must be in \[0, 64\]"),
        ({"rows_per_direction": 1}, "rows_per_direction must be >= 2, got 1"),
        ({"shrinkage": 1.0}, "shrinkage must be >= 0 and < 1"),
        ({"drawn_weight": -0.1}, "drawn_weight must be >= 0"),
        ({"clip_norm": -0.5}, "clip_norm must be >= 0"),
        ({"drawn_rows": 0}, "drawn_rows must be >= 1"),
        ({"min_samples": 1}, "min_samples must be >= 2"),
        ({"extractor_rounds": -1}, "extractor_rounds must be >= 0"),
        ({"agreement_every": -1}, "agreement_every must be >= 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"server_epochs": 0}, "server_epochs must be >= 1"),
        ({"agreement_from": "fleet"}, "unknown agreement_from 'fleet', expected one of devices, server"),
        ({"agreement_from": "server"}, "agreement_from is 'server' and agreement_every 0.* set agreement_every"),
        ({"personal_extractor": "thawed"}, "unknown personal_extractor 'thawed', expected one of frozen, own"),
        ({"rate_drop_after": -1}, "rate_drop_after"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        AveragedConfig(**settings)


def test_an_extractor_of_random_weights_must_be_trained() -> None:
    with pytest.raises(ConfigurationError, match=r"extractor_rounds = 0, and the weights of \[model\] extractor"):
        make_server(extractor_rounds=0)


@pytest.mark.parametrize(("rounds", "extractor_rounds"), [(5, 5), (1, 2)])
def test_a_run_without_a_round_after_the_extractors_is_refused_before_it_starts(
    rounds: int, extractor_rounds: int
) -> None:
    values: dict[str, Any] = {
        "run": {"name": "short", "method": "classstats", "rounds": rounds},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": {"features": "averaged", "extractor_rounds": extractor_rounds},
    }
    with pytest.raises(ConfigurationError, match=rf"rounds is {rounds}, .* run at least {extractor_rounds + 1} rounds"):
        run_config(values)
    run_config({**values, "run": {**values["run"], "rounds": extractor_rounds + 1}})


# --- the extractor


def test_extractor_rounds_average_the_extractor_alone_by_samples() -> None:
    rounds = fleet(extractor_rounds=2)
    rounds.play()
    assert [(step, device, sorted(parts)) for step, device, parts in rounds.answered] == [
        ("train", "a", ["extractor"]),
        ("train", "b", ["extractor"]),
    ]
    a, b = (parts["extractor"] for _, _, parts in rounds.answered)
    assert isinstance(a, ModelParameters)
    assert isinstance(b, ModelParameters)
    assert {*a.parameters, *a.buffers} == copied(rounds.server.extractor).keys()
    for name, tensor in rounds.server.extractor.state_dict().items():
        one, other = ({**part.parameters, **part.buffers}[name] for part in (a, b))
        mean = (35 * one.astype(np.float64) + 31 * other) / 66 if one.dtype.kind == "f" else np.maximum(one, other)
        assert_allclose(tensor.numpy(), mean, rtol=1e-6)
    rounds.play()
    sent = next(parts["extractor"] for _, _, parts in rounds.asked)
    assert isinstance(sent, ModelParameters)
    assert not np.array_equal(sent.parameters["stem.0.weight"], a.parameters["stem.0.weight"])


def test_after_them_the_extractor_is_frozen_on_every_device_to_the_bit() -> None:
    rounds = fleet().play(2)
    frozen = copied(rounds.server.extractor)
    rounds.play(2)
    assert equal(copied(rounds.server.extractor), frozen)
    for half in rounds.halves.values():
        assert equal(copied(half.local.taps.extractor), frozen)
        assert half.personal is not None
        assert equal(copied(half.personal.extractor), frozen)


# --- summaries and their merge


def test_a_device_sends_the_summaries_of_classes_with_enough_samples_and_nothing_else() -> None:
    rounds = fleet().play(2)
    sent = {device: parts for step, device, parts in rounds.answered if step == "summarise"}
    assert [sorted(parts) for parts in sent.values()] == [["statistics"]] * 2
    a = sent["a"]["statistics"]
    assert isinstance(a, ClassStatistics)
    assert (a.labels, list(a.counts)) == ([0, 1], [20, 12])  # type: ignore[arg-type]  # of class 2 it has three only
    half = rounds.halves["a"]
    features = extract(half.local.taps.features, half.local.data.inputs, model=half.local.model).flatten(1).double()
    expected = summarise(features[:20].numpy(), half.config.rank)
    found = from_wire(a)[0]
    assert_allclose(found.mean, expected.mean, rtol=1e-3, atol=1e-6)
    assert_allclose(found.directions, expected.directions, rtol=2e-3, atol=1e-4)
    assert_allclose(found.variance, expected.variance, rtol=1e-3, atol=1e-6)
    assert [step for step, _, parts in rounds.answered if step == "learn" and parts] == []


def test_every_device_gets_the_shrunk_merge_once() -> None:
    rounds = fleet(recognition_guard=False).play(2)
    parts = {
        device: from_wire(sent["statistics"])  # type: ignore[arg-type]
        for step, device, sent in rounds.answered
        if step == "summarise"
    }
    labels = sorted({label for part in parts.values() for label in part})
    merged = {label: merge([part[label] for part in parts.values() if label in part], 8) for label in labels}
    expected = shrink(merged, 0.1)
    for step, _, asked in rounds.asked:
        if step == "learn":
            found = from_wire(asked["classes"])  # type: ignore[arg-type]
            assert sorted(found) == labels == [0, 1, 2, 3]
            for label in labels:
                assert found[label].count == expected[label].count
                assert_allclose(found[label].mean, expected[label].mean, rtol=1e-3, atol=1e-6)
                assert_allclose(found[label].variance, expected[label].variance, rtol=1e-3, atol=1e-6)
    assert rounds.events == [("class-of-one-device", "classes [0, 2, 3] are known from one device each; they are used")]
    rounds.play()
    assert [(step, sorted(parts)) for step, _, parts in rounds.asked] == [("learn", ["plan"])] * 2


def test_means_only_sends_and_draws_means_without_spread() -> None:
    """The control: the one row of a class is its mean over all devices' samples."""
    settings: dict[str, Any] = {"means_only": True, "recognition_guard": False}
    server, counts = make_server(**settings), {"a": (6, 9, 0, 0), "b": (0, 6, 12, 7)}
    devices = {name: make_device(counts[name], seed, **settings) for seed, name in enumerate(counts)}
    rounds = Rounds(server, devices).play(2)
    for step, _, parts in rounds.answered:
        if step == "summarise":
            sent = parts["statistics"]
            assert isinstance(sent, ClassStatistics)
            assert (sent.directions, sent.variances) == (None, None)
    assert declared_parts(server.run_exchanges())["statistics"].declared == {"means": (128,)}
    drawn, labels = devices["a"].draw(lesson_of(1))
    for label in range(CLASSES):
        rows = drawn[labels == label]
        assert (rows == rows[0]).all()
    own = [devices[name].features_of_data()[devices[name].local.data.labels == 1].double() for name in counts]
    mean = (own[0].sum(dim=0) + own[1].sum(dim=0)) / 15
    assert_close(drawn[labels == 1][0].double(), mean, rtol=2e-3, atol=2e-3)


def test_clipped_features_make_short_moments_and_the_app_is_told_how_many() -> None:
    norm = 0.25
    rounds = fleet(clip_norm=norm).play(2)
    for step, device, parts in rounds.answered:
        if step == "summarise":
            half = rounds.halves[device]
            lengths = half.features_of_data().flatten(1).norm(dim=1)
            assert lengths.max() > norm
            assert rounds.notes_of["summarise", device]["rows_clipped"] == int((lengths > norm).sum())
            for one in from_wire(parts["statistics"]).values():  # type: ignore[arg-type]
                square = np.square(one.mean).sum() + (one.count - 1) / one.count * one.diagonal.sum()
                assert 0 < square <= (1.01 * norm) ** 2
    unclipped = fleet().play(2)
    assert [unclipped.notes_of["summarise", device]["rows_clipped"] for device in "ab"] == [0, 0]


def test_a_device_without_enough_of_any_class_takes_part() -> None:
    rounds = fleet()
    rounds.halves["c"] = make_device([2, 2, 2, 2], seed=3)
    rounds.play(3)
    assert rounds.server.parts["c"].labels == []
    assert rounds.notes_of["summarise", "c"] == {"rows_clipped": 0, "classes_too_small": 4}
    assert [kind for kind, _ in rounds.events].count("no-class-sent") == 1
    assert ("learn", "c") in rounds.steps()


def test_numbers_that_do_not_fit_the_wire_are_a_clear_error() -> None:
    half = make_device([20, 12, 3, 0], extractor_rounds=1)
    half.local.data.inputs.mul_(1e7)
    message: Parts = {"extractor": make_server().initial()}
    answer = half.handle(Ask(round=1, step="summarise", seed=1, parts=message))
    with pytest.raises(KnowledgeError, match=r"statistics/means, row 0: .* does not fit float16.*use float32"):
        encode(answer.parts, np.float16)


class Refused(Exception):
    """Ends a run in which an upload was refused."""


def test_a_device_cannot_count_more_samples_than_it_has_declared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def boastful(classes: dict[int, ClassSummary], **rest: Any) -> ClassStatistics:
        sent = to_wire(classes, **rest)
        return sent if sent.counts is None else replace(sent, counts=100 * sent.counts)

    monkeypatch.setattr("fleetdistill.methods.classstats.averaged.to_wire", boastful)
    prepared = prepare(replace(RUNS["classstats averaged"], train_limit=120), tmp_path / "work")
    store = Store.in_memory()

    def stop() -> None:
        if store.history.events(RUN, "refused"):
            raise Refused

    with ExitStack() as stack:
        engine = Engine(store, prepared[0], DriveDevices(devices_of(prepared, stack, DeviceApi(store)), stop))
        with pytest.raises(Refused):
            asyncio.run(engine.run())
    (event,) = store.history.events(RUN, "refused")
    declared = len(load_arrays(prepared[1][0].data_file)[1])
    assert event["code"] == "bad-value"
    assert event["text"].endswith(f"the device has declared {declared} samples")
    store.close()


def test_a_checkpoint_keeps_four_tensors_of_a_device_and_what_it_sent_byte_for_byte() -> None:
    rounds = fleet().play(2)
    labels, *tensors = unpack_state(pack_state(rounds.server.state_dict()))["parts"]["a"]
    sent = next(parts["statistics"] for step, device, parts in rounds.answered if (step, device) == ("summarise", "a"))
    assert isinstance(sent, ClassStatistics)
    assert labels == sent.labels
    arrays = (sent.counts, sent.means, sent.directions, sent.variances)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert array is not None
        assert (tensor.numpy().dtype, tensor.numpy().tobytes()) == (array.dtype, array.tobytes())


def test_the_personal_predictor_is_set_apart_once_though_its_round_is_played_again() -> None:
    rounds = fleet().play()
    rounds.fall_short()
    half = rounds.halves["a"]
    personal, optimizers = half.personal, dict(half.optimizers)
    rounds.play()
    assert ("summarise", "a") in rounds.steps()
    assert half.personal is personal
    assert half.optimizers == optimizers
    message: Parts = {"extractor": model_parameters(make_device([9, 9, 9, 9], seed=5).local.taps.extractor)}
    half.handle(Ask(round=9, step="summarise", seed=1, parts=message))
    assert half.personal is not personal  # of another extractor's features it knows nothing
    assert half.personal is not None
    assert equal(copied(half.personal), copied(half.local.model))


def test_the_personal_predictor_is_kept_without_the_extractor() -> None:
    half = fleet().play(3).halves["b"]
    kept = half.state_dict()["personal"]
    assert half.personal is not None
    of_predictor = half.personal.predictor.state_dict()
    assert [tensor.tolist() for tensor in kept.values()] == [tensor.tolist() for tensor in of_predictor.values()]


# --- learning


def test_own_and_drawn_rows_go_through_the_predictor_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = fleet().play(2)
    half = rounds.halves["b"]
    sizes, predict = list[int](), half.local.taps.predict
    norm = next(one for one in half.local.model.predictor.modules() if isinstance(one, nn.BatchNorm2d))
    before = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    monkeypatch.setattr(half.local.model, "predict", lambda features: sizes.append(len(features)) or predict(features))  # type: ignore[func-returns-value]
    rounds.play()
    assert sizes == [62]  # 31 own rows in one batch, and as many drawn ones
    assert int(norm.num_batches_tracked) == before + 1  # type: ignore[arg-type]


def test_a_device_learns_classes_that_it_has_never_seen() -> None:
    rounds = fleet(local_epochs=8, learning_rate=0.05).play(8)
    test = rows_of([25] * CLASSES, seed=9)
    for half in rounds.halves.values():
        answers = {GENERAL: half.local.model, **half.variants()}
        right = {name: extract(model, test.inputs).argmax(1) == test.labels for name, model in answers.items()}
        missing = half.local.data.labels.bincount(minlength=CLASSES)[test.labels] == 0
        assert float(right[GENERAL][missing].double().mean()) > 0.9
        assert float(right[GENERAL].double().mean()) > 0.9
        assert float(right[PERSONAL][~missing].double().mean()) > 0.9


def test_without_merged_classes_a_device_learns_from_its_own_rows() -> None:
    rounds = fleet(min_samples=50).play(3)
    assert rounds.server.classes == {}
    assert all(half.trained is not None and half.trained.samples_seen > 0 for half in rounds.halves.values())


def test_rows_are_new_in_every_round_and_the_same_on_every_device() -> None:
    rounds = fleet()
    seeds = []
    for _ in range(4):
        rounds.play()
        seeds.append({parts["plan"].values["draw_seed"] for step, _, parts in rounds.asked if step == "learn"})  # type: ignore[attr-defined]
    assert [len(one) for one in seeds] == [0, 1, 1, 1]
    assert len(set().union(*seeds)) == 3
    a, b = (half.draw(lesson_of(5)) for half in rounds.halves.values())
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def test_features_below_zero_are_drawn_only_where_the_extractor_gives_such() -> None:
    assert make_server().nonnegative
    signed = make_server(extractor=f"{__name__}:signed_extractor")
    assert not signed.nonnegative
    one = {0: ClassSummary(count=5, mean=np.zeros(6), directions=np.zeros((0, 6)), variance=np.ones(6))}
    rows, labels = draw_classes(one, 20, 3, nonnegative=False)
    assert rows.min() < 0
    assert set(labels) == {0}
    assert draw_classes(one, 20, 3, nonnegative=True)[0].min() == 0


def signed_extractor(input_shape: Sequence[int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())


def test_a_lesson_before_the_statistics_is_refused() -> None:
    half = make_device([20, 12, 3, 0])
    plan = Plan(values={"draw_seed": 1, "nonnegative": True})
    with pytest.raises(WireError, match="before the fleet's class statistics"):
        half.handle(Ask(round=1, step="learn", seed=1, parts={"plan": plan}))


def spoilt_parts(parts: Parts, spoil: str) -> Parts:
    """A lesson of a server that is broken."""
    plan, classes, agreed = parts["plan"], parts["classes"], parts["agreed"]
    assert isinstance(plan, Plan)
    assert isinstance(classes, ClassStatistics)
    assert isinstance(agreed, SoftPredictions)
    assert classes.means is not None
    changes: dict[str, Parts] = {
        "features": {
            "classes": replace(classes, means=classes.means[:, :-1], directions=None, variances=None),
        },
        "label": {"classes": replace(classes, labels=[label + 3 for label in classes.labels])},
        "rows": {"agreed": replace(agreed, values=agreed.values[:3])},
        "columns": {"agreed": replace(agreed, values=agreed.values[:, :2])},
    }
    values = {name: value for name, value in plan.values.items() if name != spoil}
    return {**parts, **changes.get(spoil, {"plan": Plan(values=values)})}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("features", r"means of the fleet's classes have shape \[4, 127\], expected finite numbers of \[4, 128\]"),
        ("label", r"fleet's classes are \[3, 4, 5, 6\], expected different ones in \[0, 4\)"),
        ("rows", r"soft predictions on drawn rows are \[3, 4\], expected \[40, 4\]"),
        ("columns", r"soft predictions on drawn rows are \[40, 2\], expected \[40, 4\]"),
        *((name, f"the plan's {name} is None, expected") for name in Lesson.__annotations__),
    ],
)
def test_a_lesson_that_does_not_fit_is_refused_with_a_sentence(spoil: str, says: str) -> None:
    rounds = fleet(agreement_every=9, agreement_from="server", recognition_guard=False).play(2)
    parts = next(parts for step, device, parts in rounds.asked if (step, device) == ("learn", "a"))
    with pytest.raises(WireError, match=says):
        rounds.halves["a"].handle(Ask(round=3, step="learn", seed=1, parts=spoilt_parts(parts, spoil)))


def test_a_personal_predictor_that_diverges_is_as_before_and_the_device_learns_on() -> None:
    rounds = fleet(personal_extractor="own").play(2)
    half = rounds.halves["a"]
    assert half.personal is not None
    with torch.no_grad():
        for parameter in half.personal.predictor.parameters():
            parameter.fill_(1e30)  # finite, and what comes of it is not
    before, optimizer = copied(half.personal), pack_state(half.optimizers["personal"].state_dict())
    for _ in range(2):
        general = copied(half.local.model)
        rounds.play()
        assert rounds.declined == []
        assert rounds.notes_of["learn", "a"] == {"personal_undone": 1}
        assert rounds.notes_of["learn", "b"] == {"personal_undone": 0}
        assert equal(copied(half.personal), before)
        assert pack_state(half.optimizers["personal"].state_dict()) == optimizer
        assert not equal(copied(half.local.model), general)


def test_of_a_personal_training_that_fails_half_way_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    half = fleet().play(3).halves["a"]
    before = pack_state(half.state_dict())
    train = half._train

    def fail_at_the_end(model: nn.Module, name: str, *rest: Any) -> None:
        train(model, name, *rest)
        raise KnowledgeError("the loss is nan")

    monkeypatch.setattr(half, "_train", fail_at_the_end)
    assert half.learn_personal(half.features_of_data(), rate=0.01, seed=5)
    assert pack_state(half.state_dict()) == before


@pytest.mark.parametrize(
    "changes", [{"agreement_from": "devices"}, {"agreement_from": "server"}, {"personal_extractor": "own"}]
)
def test_both_halves_go_on_from_their_saved_state_as_if_nothing_had_been(changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"agreement_every": 2, "drawn_rows": 8, **changes}
    rounds = fleet(**settings).play(4)
    again = fleet(**settings)
    again.completed, again.round = rounds.completed, rounds.round
    again.server.load_state_dict(unpack_state(pack_state(rounds.server.state_dict())))
    for name, half in rounds.halves.items():
        saved = unpack_state(pack_state({"model": half.local.model.state_dict(), "method": half.state_dict()}))
        again.halves[name].local.model.load_state_dict(saved["model"])
        again.halves[name].load_state_dict(saved["method"])
    rounds.play(2)
    again.play(2)
    assert pack_state(again.server.state_dict()) == pack_state(rounds.server.state_dict())
    for name, half in rounds.halves.items():
        assert pack_state(half.state_dict()) == pack_state(again.halves[name].state_dict())
        assert equal(copied(half.local.model), copied(again.halves[name].local.model))


def test_the_personal_predictors_own_extractor_trains_and_the_fleets_stays() -> None:
    """Nor is a general answer changed by it, or what a device sends."""
    frozen, own = (fleet(personal_extractor=one).play(3) for one in ("frozen", "own"))
    for name, half in own.halves.items():
        other = frozen.halves[name]
        assert equal(copied(half.local.model), copied(other.local.model))
        assert half.personal is not None
        assert other.personal is not None
        fleets = copied(half.local.taps.extractor)
        assert equal(copied(other.personal.extractor), fleets)
        assert not equal(copied(half.personal.extractor), fleets)
        x = half.local.data.inputs[:3]
        general, personal = (one.eval()(x).log_softmax(dim=1) for one in (half.local.model, half.personal))
        answer = half.variants()[PERSONAL].eval()
        assert_close(answer(x), general + personal)


def test_the_learning_rate_drops_to_a_tenth_when_it_is_to() -> None:
    """Three rounds, the first the extractor's; rounds are counted as completed, however many fell short."""
    config = config_of(rate_drop_after=2, learning_rate=0.5)
    assert [config.local_rate(number) for number in (1, 2, 3)] == pytest.approx([0.5, 0.5, 0.05])
    assert config_of(learning_rate=0.5).local_rate(99) == 0.5
    early = config_of(rate_drop_after=1, extractor_rounds=3, learning_rate=0.5)  # while one extractor is trained, never
    assert [early.local_rate(number) for number in (2, 3, 4)] == pytest.approx([0.5, 0.5, 0.05])
    rounds = fleet(rate_drop_after=2, learning_rate=0.02)
    used = []
    for _ in range(3):
        rounds.play()
        optimizers = [one for half in rounds.halves.values() for one in half.optimizers.values()]
        used.append({group["lr"] for one in optimizers for group in one.param_groups})
    assert used == [{0.02}, {0.02}, {0.1 * 0.02}]


# --- agreement


def test_agreement_is_the_mean_and_holds_until_the_next_exchange() -> None:
    rounds = fleet(agreement_every=2, recognition_guard=False)
    exchanges = []
    for _ in range(6):
        rounds.play()
        exchanges.append(sorted({step for step, _ in rounds.steps()}))
        if "agree" in exchanges[-1]:
            sent = [parts["predictions"] for step, _, parts in rounds.answered if step == "agree"]
            assert all(isinstance(one, SoftPredictions) for one in sent)
            mean = np.mean([one.values.astype(np.float64) for one in sent], axis=0)  # type: ignore[attr-defined]
            told = [parts["agreed"] for step, _, parts in rounds.asked if step == "learn"]
            for one in told:
                assert_allclose(one.values, mean, atol=1e-3)  # type: ignore[attr-defined]
            seed = sent[0].noise_seed  # type: ignore[attr-defined]
        if len(exchanges) > 3:
            plans = [parts["plan"].values for step, _, parts in rounds.asked if step == "learn"]  # type: ignore[attr-defined]
            assert {plan["draw_seed"] for plan in plans} == {seed}
            ask = Ask(round=9, step="learn", seed=1, parts=rounds.asked[-1][2])
            drawn = rounds.halves["a"].drawn(Lesson.of(ask), 1)
            assert drawn is not None
            assert drawn.soft is not None
            assert drawn.soft.shape == (10 * 4, CLASSES)
    assert exchanges == [
        ["train"],
        ["learn", "summarise"],
        ["learn"],
        ["agree", "learn"],
        ["learn"],
        ["agree", "learn"],
    ]


def test_predictions_on_other_rows_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = fleet(agreement_every=1).play(2)
    agree = AveragedDevice.agree

    def on_other_rows(self: AveragedDevice, ask: Ask) -> Any:
        answer = agree(self, ask)
        sent = answer.parts["predictions"]
        assert isinstance(sent, SoftPredictions)
        changes = {"noise_seed": 1} if self is rounds.halves["a"] else {"values": sent.values[:3]}
        return replace(answer, parts={"predictions": replace(sent, **changes)})

    on_other_rows.answers_step = "agree"  # type: ignore[attr-defined]
    monkeypatch.setattr(AveragedDevice, "agree", on_other_rows)
    rounds.play()
    assert [kind for kind, _ in rounds.events if kind == "member-left-out"] == ["member-left-out"] * 2
    assert rounds.server.agreed is None


def lessons(rounds: Rounds) -> list[tuple[str, list[str]]]:
    return [(device, sorted(parts)) for step, device, parts in rounds.asked if step == "learn"]


def test_the_servers_own_predictor_teaches_the_rows_that_hold_until_the_next_time() -> None:
    """Of the round of the merge already, and nothing goes up."""
    rounds = fleet(agreement_every=2, agreement_from="server", recognition_guard=False).play()
    seeds, told = list[Any](), list[list[str]]()
    for _ in range(5):
        rounds.play()
        assert not any(parts for step, _, parts in rounds.answered if step == "learn")
        told.append(lessons(rounds)[0][1])
        plan = rounds.asked[-1][2]["plan"]
        assert isinstance(plan, Plan)
        seeds.append(plan.values["draw_seed"])
        for half in rounds.halves.values():
            drawn = half.drawn(Lesson.of(Ask(round=9, step="learn", seed=1, parts={"plan": plan})), 1)
            assert drawn is not None
            assert drawn.soft is not None
            logits = extract(rounds.server.predictor, drawn.features)
            assert_close(drawn.soft, (logits / 2.0).softmax(dim=-1), rtol=0, atol=1e-3)
    assert told == [["agreed", "classes", "plan"], ["plan"], ["agreed", "plan"], ["plan"], ["agreed", "plan"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4]
    assert set(rounds.server.answer_kinds()) == {"train", "summarise", "learn"}
    assert "logits" not in rounds.server.columns(rounds.server.config)


def test_the_server_draws_the_rows_that_devices_draw() -> None:
    rounds = fleet().play(2)
    rows, labels = rounds.server.own.draw(rounds.server.classes, 5)
    for half in rounds.halves.values():
        assert torch.equal(half.draw(lesson_of(5))[0], rows)
        assert torch.equal(half.draw(lesson_of(5))[1], labels)


def test_with_a_new_merge_the_server_teaches_anew() -> None:
    rounds = fleet(agreement_every=50, agreement_from="server", recognition_guard=False).play(3)
    assert lessons(rounds) == [("a", ["plan"]), ("b", ["plan"])]
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    everything = ["agreed", "classes", "plan"]
    assert lessons(rounds.play()) == [("a", everything), ("b", everything), ("c", everything)]
    del rounds.halves["c"]
    rounds.server.forget("c", rounds)
    assert lessons(rounds.play()) == [("a", everything), ("b", everything)]
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["plan"])]


def test_without_a_merged_class_the_server_teaches_nothing() -> None:
    rounds = fleet(agreement_every=1, agreement_from="server", min_samples=50).play(3)
    assert lessons(rounds) == [("a", ["plan"]), ("b", ["plan"])]


def test_a_merge_made_in_a_round_of_agreement_goes_down_once() -> None:
    rounds = fleet(agreement_every=1).play(3)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.play()
    told = [(step, device) for step, device, parts in rounds.asked if "classes" in parts]
    assert told == [("agree", "a"), ("agree", "b"), ("agree", "c")]


# --- who holds what, after rounds that fell short and answers that were lost


def newcomer_falls_short() -> Rounds:
    """The merge with a newcomer's part, for which every device has a receipt, is taken back."""
    rounds = fleet(recognition_guard=False).play(3)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.fall_short()
    rounds.away = {"c"}
    return rounds


def test_after_a_round_that_fell_short_all_draw_from_one_merge() -> None:
    rounds = newcomer_falls_short()
    assert rounds.halves["a"].classes[3].count != rounds.server.classes[3].count
    rounds.play()
    assert rounds.declined == []
    (seed,) = {parts["plan"].values["draw_seed"] for _, _, parts in rounds.asked}  # type: ignore[attr-defined]
    rows, _ = rounds.server.own.draw(rounds.server.classes, seed)
    for name in ("a", "b"):
        assert torch.equal(rounds.halves[name].draw(lesson_of(seed))[0], rows)
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["plan"])]


def test_devices_ahead_of_a_server_from_a_backup_learn_nothing_from_another_merge_and_are_told_anew() -> None:
    rounds = newcomer_falls_short()
    rounds.round -= 1  # as if the round had never been
    rounds.fall_short()
    assert [(step, device) for step, device, _ in rounds.declined] == [("learn", "a"), ("learn", "b")]
    assert all("is about class statistics" in text for _, _, text in rounds.declined)
    rounds.play()
    assert rounds.declined == []
    assert lessons(rounds) == [("a", ["classes", "plan"]), ("b", ["classes", "plan"])]


def test_who_does_not_answer_is_told_all_again() -> None:
    rounds = fleet(agreement_every=50, agreement_from="server")
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.play(3)
    rounds.deaf = {("learn", "b")}
    rounds.play()
    rounds.deaf = set()
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["agreed", "classes", "plan"]), ("c", ["plan"])]


def test_a_newcomer_that_does_not_answer_is_waited_for_less_and_less() -> None:
    rounds = fleet().play(2)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.deaf = {("summarise", "c")}
    asked = [("summarise", "c") in rounds.play().steps() for _ in range(11)]
    assert [number for number, was in enumerate(asked) if was] == [0, 2, 5, 10]
    rounds.deaf, rounds.away = set(), {"a", "b"}  # nobody is left who could complete a round
    for _ in range(9):
        rounds.fall_short()
    rounds.play()
    assert "c" in rounds.server.parts
    assert rounds.server.state_dict()["silent"] == {}


def test_who_was_not_waited_for_in_the_round_of_the_summaries_is_asked_in_the_next() -> None:
    rounds = fleet()
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3)
    rounds.play()
    rounds.deaf = {("summarise", "c")}
    rounds.play()
    rounds.deaf = set()
    rounds.play()
    assert [step for step, device in rounds.steps() if device == "c"] == ["summarise", "learn"]


def with_older_state(rounds: Rounds) -> Rounds:
    """A device goes on from a state directory of before the extractor was frozen."""
    rounds.halves["a"] = make_device([20, 12, 3, 0], seed=1)
    return rounds


def test_a_device_of_an_older_state_is_asked_for_its_summary_again_and_learns() -> None:
    rounds = fleet()
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3)
    classes = with_older_state(rounds.play(2)).server.classes
    steps = []
    for _ in range(6):
        rounds.play()
        steps.append([step for step, device in rounds.steps() if device == "a"])
    assert steps == [["learn"]] * 3 + [["summarise", "learn"]] + [["learn"]] * 2
    assert rounds.declined == []
    assert rounds.server.state_dict()["silent"] == {}
    assert rounds.server.classes is classes  # what it sent first stays
    rounds.deaf = {("summarise", "a"), ("learn", "a")}
    asked = [("summarise", "a") in rounds.play().steps() for _ in range(14)]
    assert [number for number, was in enumerate(asked) if was] == [3, 6, 11]


def test_a_fleet_too_small_to_go_on_without_a_device_of_an_older_state_goes_on() -> None:
    rounds = with_older_state(fleet().play(2))
    for expected in (["learn"], ["learn"], ["learn", "summarise"]):
        rounds.fall_short()
        assert sorted({step for step, _ in rounds.steps()}) == expected
    assert rounds.declined == []
    assert [step for step, device, _ in rounds.answered if step == "learn"] == ["learn"] * 2


def test_a_round_in_which_nobody_has_a_summary_falls_short() -> None:
    rounds = fleet().play(3)
    rounds.away = {"a", "b"}
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.deaf = {("summarise", "c")}
    with pytest.raises(QuorumNotReached, match=r"step 'learn': 0 devices answered, the quorum is 1"):
        rounds.play()


# --- guards, newcomers and leavers


def alike(label: int) -> ClassSummary:
    return ClassSummary(count=10, mean=np.ones(128), directions=np.zeros((8, 128)), variance=np.full(128, 0.1))


def parts_of(**parts: dict[int, ClassSummary]) -> dict[str, ClassStatistics]:
    return {device: to_wire(classes) for device, classes in parts.items()}


def test_classes_that_nobody_can_tell_apart_are_left_out() -> None:
    rounds = fleet()
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(4)}, b={})
    rounds.server.merge_parts(rounds)
    left_out = [text for kind, text in rounds.events if kind == "recognition-guard"]
    assert len(left_out) >= 2
    assert len(rounds.server.classes) == 4 - len(left_out)
    off = fleet(recognition_guard=False)
    off.server.parts = rounds.server.parts
    off.server.merge_parts(off)
    assert len(off.server.classes) == 4


def test_what_must_be_recognised_does_not_rise_with_each_class_that_goes() -> None:
    """Half of each of four classes; three alone would need two thirds, which these do not have."""
    rounds = fleet()
    rounds.server.own.recognition = lambda classes, seed: {label: 0.4 if label == 1 else 0.6 for label in classes}
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(4)})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [0, 2, 3]
    (text,) = [text for kind, text in rounds.events if kind == "recognition-guard"]
    assert "0.500 is the least" in text
    assert "raise server_epochs" in text


def test_of_a_class_that_is_left_out_nothing_is_in_the_variance_of_the_others_or_in_the_predictor() -> None:
    parts = {label: replace(alike(label), variance=np.full(128, 0.1 + label)) for label in range(4)}
    rounds, without = fleet(), fleet()
    rounds.server.own.recognition = lambda classes, seed: {label: float(label != 1) for label in classes}
    rounds.server.parts = parts_of(a=parts)
    rounds.server.merge_parts(rounds)
    without.server.own.recognition = rounds.server.own.recognition
    without.server.parts = parts_of(a={label: parts[label] for label in (0, 2, 3)})
    without.server.merge_parts(without)
    assert [kind for kind, _ in rounds.events] == ["class-of-one-device", "recognition-guard"]
    assert sorted(rounds.server.classes) == [0, 2, 3]
    assert rounds.server.version == without.server.version  # named by what is in it
    assert equal(copied(rounds.server.predictor), copied(without.server.predictor))


@pytest.mark.parametrize("guard", [True, False])
def test_a_class_that_training_does_not_survive_is_left_out_alone(guard: bool) -> None:
    """Of two devices: there is no third that would tell which of them is on another scale."""
    rounds, without = (fleet(recognition_guard=guard, server_epochs=40) for _ in range(2))
    means = {label: np.where(np.arange(128) // 32 == label, 1.0, 0.0) for label in range(4)}
    honest = {label: replace(alike(label), mean=means[label]) for label in (1, 2, 3)}
    far = replace(alike(0), mean=np.full(128, 1e15), variance=np.full(128, 1e20))
    for one, parts in ((rounds, parts_of(a={0: far}, b=honest)), (without, parts_of(b=honest))):
        one.server.context = replace(one.server.context, knowledge_type="float32")
        one.server.parts = parts
        one.server.merge_parts(one)
    left_out = [text for kind, text in rounds.events if kind == "class-left-out"]
    assert len(left_out) == 1
    assert left_out[0].startswith("class 0: the server's own predictor cannot learn from rows")
    assert sorted(rounds.server.classes) == sorted(without.server.classes) == [1, 2, 3]
    assert rounds.server.version == without.server.version
    assert equal(copied(rounds.server.predictor), copied(without.server.predictor))


def test_twice_chance_is_asked_for_and_of_two_classes_half_way_from_chance_to_all() -> None:
    assert [least_recognised(classes) for classes in (1, 2, 3, 4, 10)] == [0, 0.75, 2 / 3, 0.5, 0.2]


@pytest.mark.parametrize("classes", [2, 3])
def test_of_few_classes_that_look_alike_not_all_stay(classes: int) -> None:
    """Rates of classes that are all alike come to 1 together: no two reach three quarters, no three two thirds."""
    rounds = fleet()
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(classes)})
    rounds.server.merge_parts(rounds)
    assert len(rounds.server.classes) <= 1


def test_a_class_that_is_alone_stays_though_the_server_does_not_know_it() -> None:
    rounds = fleet(server_epochs=1, learning_rate=1e-9)
    rounds.server.parts = parts_of(a={3: alike(3)})
    rounds.server.merge_parts(rounds)
    assert rounds.figures["recognition"]["3"] < 1
    assert sorted(rounds.server.classes) == [3]


def test_a_device_on_another_scale_reaches_no_class_of_the_others() -> None:
    """Its variance would be part of every class's by way of the pooled one, and it claims most of the samples."""
    honest = {name: {label: alike(label) for label in range(1, 4)} for name in ("a", "b")}
    hostile = replace(alike(0), count=2**31 - 1, variance=np.full(128, 60000.0))
    rounds, without = fleet(recognition_guard=False), fleet(recognition_guard=False)
    without.server.parts = parts_of(**honest)
    without.server.merge_parts(without)
    rounds.server.parts = parts_of(**honest, c={0: hostile})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [1, 2, 3]
    for label, one in rounds.server.classes.items():
        assert_allclose(one.diagonal, without.server.classes[label].diagonal, rtol=1e-12)
    assert [kind for kind, _ in rounds.events] == ["rows-capped", "summary-left-out"]
    assert "c" in rounds.server.parts  # kept apart: where the others come to be as long, it counts

    del rounds.server.parts["b"]  # no majority any more that says who is right
    rounds.server.merge_parts(rounds)
    assert 0 in rounds.server.classes


def test_devices_of_up_to_four_times_the_median_length_are_all_merged() -> None:
    rounds = fleet(recognition_guard=False)
    far = {"a": 1.0, "b": 2.0, "c": 7.9}
    rounds.server.parts = parts_of(**{name: {0: replace(alike(0), mean=np.full(128, far[name]))} for name in far})
    rounds.server.merge_parts(rounds)
    assert rounds.server.classes[0].count == 30
    assert rounds.events == []


def test_a_class_whose_merge_does_not_fit_the_wire_is_left_out_alone() -> None:
    rounds = fleet(recognition_guard=False)
    long = np.zeros((8, 128))
    long[0] = 65504
    far = {sign: replace(alike(0), mean=np.full(128, sign * 65504.0), directions=long) for sign in (1, -1)}
    rounds.server.parts = parts_of(a={0: far[1], 1: alike(1)}, b={0: far[-1], 1: alike(1)})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [1]
    assert [kind for kind, _ in rounds.events] == ["class-left-out"]
    encode({"classes": to_wire(rounds.server.classes)}, np.float16)


def test_a_newcomer_sends_its_summary_then_and_everybody_gets_the_new_merge() -> None:
    rounds = fleet(recognition_guard=False).play(3)
    before = rounds.server.classes[3].count
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.quorums.clear()
    rounds.play()
    assert [step for step in rounds.steps() if step[0] == "summarise"] == [("summarise", "c")]
    assert dict(rounds.quorums) == {"summarise": 0.0, "learn": None}
    assert rounds.server.classes[3].count == before + 30
    assert all("classes" in parts for step, _, parts in rounds.asked if step == "learn")
    assert equal(copied(rounds.halves["c"].local.taps.extractor), copied(rounds.server.extractor))
    rounds.play()
    assert not any("classes" in parts for _, _, parts in rounds.asked)


def test_who_leaves_stays_in_the_merge() -> None:
    rounds = fleet(recognition_guard=False).play(2)
    classes = rounds.server.classes
    rounds.away = {"b"}
    rounds.play(2)
    assert rounds.server.classes is classes
    assert rounds.steps() == [("learn", "a")]


def files_with(directory: Path, wanted: bytes) -> list[Path]:
    """Files of a store that hold these bytes, the database's and its log among them."""
    return [file for file in sorted(directory.rglob("*")) if file.is_file() and wanted in file.read_bytes()]


class Forgetting:
    """A run on the disk whose first device is to be forgotten while it is under way."""

    def __init__(self, directory: Path, rounds: int) -> None:
        wanted = replace(RUNS["classstats averaged"], devices=3, rounds=rounds, train_limit=300, alpha=10.0)
        config, specs, work = prepare(wanted, directory / "work")
        terms = config.run.model_copy(update={"min_devices": 2})  # those that are left are enough
        self.prepared = config.model_copy(update={"run": terms}), specs, work
        self.directory = directory / "store"
        self.store = Store.open(self.directory)
        self.device = self.prepared[1][0].name
        self.sent: list[bytes] = []

    def run(self, ask_in_round: int) -> None:
        with ExitStack() as stack:
            devices = devices_of(self.prepared, stack, DeviceApi(self.store))
            waker = DriveDevices(devices, lambda: self._look(ask_in_round))
            asyncio.run(Engine(self.store, self.prepared[0], waker).run())

    def _look(self, ask_in_round: int) -> None:
        """Keeps what the device's part looks like in an upload and in a checkpoint; then asks to forget it."""
        if not self.sent:
            for row in self.store.asks.uploads(RUN):
                if row["device"] == self.device and row["step"] == "summarise":
                    part = decode(self.store.blobs.open(row["sha256"]))["statistics"]
                    assert isinstance(part, ClassStatistics)
                    assert part.means is not None
                    self.sent = [part.means[0].tobytes(), part.means[1].tobytes()]
        now = self.store.runs.open_round(RUN)
        known = self.store.devices.get(RUN, self.device)
        if now is not None and now["round"] == ask_in_round and known is not None and not known["forget_asked_at"]:
            assert all(len(files_with(self.directory, one)) > 1 for one in self.sent)
            assert not ask_to_forget(self.store, RUN, self.device, served=RUN)

    def state(self) -> dict[str, Any]:
        row = self.store.runs.get(RUN)
        assert row is not None
        state: dict[str, Any] = unpack_state(self.store.blobs.get_state(row["checkpoint"]))
        return state


def test_a_forgotten_part_is_nowhere_in_the_store_and_the_others_get_the_merge_without_it(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=5)
    run.run(ask_in_round=3)
    state, others = run.state(), [spec.name for spec in run.prepared[1][1:]]
    assert sorted(state["parts"]) == sorted(state["held"]) == others
    parts = [from_wire(unpacked(part)) for part in state["parts"].values()]
    for label, one in from_wire(unpacked(state["classes"])).items():
        assert one.count == sum(part[label].count for part in parts if label in part)
    assert {tuple(held) for held in state["held"].values()} == {(state["version"], -1)}
    asked = {(row["round"], row["device"]) for row in run.store.asks.uploads(RUN) if row["step"] == "learn"}
    assert {device for number, device in asked if number > 3} == set(others)
    assert len(run.sent) == 2
    assert [files_with(run.directory, one) for one in run.sent] == [[], []]
    assert [row["device"] for row in run.store.history.events(RUN, "forgotten")] == [run.device]
    run.store.close()


def test_a_forgotten_device_is_told_so_and_again_when_it_comes_back(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=4)
    run.run(ask_in_round=3)
    said: list[str] = []
    with ExitStack() as stack:
        device = devices_of(run.prepared, stack, DeviceApi(run.store))[0]
        device._guard.on_event = lambda event: said.append(f"{event.kind}: {event.text}")
        assert run.store.asks.of_step(RUN, 4, 1)
        assert run.store.asks.next_open(RUN, run.device) is None
        run.store.runs.end(RUN, "running", "")  # as if the others were still at it
        assert device.step(0.0) is Step.FINISHED
        assert sorted(device.models) == ["general", "personal"]
    assert said[-1].startswith(f"finished: the operator took {run.device} out of run '{RUN}' and has it forgotten")
    row = next(row for row in views.devices(run.store, RUN).lists["devices"] if row["device"] == run.device)
    assert str(row["forgotten"]).startswith("20")
    assert {one["forgotten"] for one in views.devices(run.store, RUN).lists["devices"]} == {None, row["forgotten"]}
    assert ask_to_forget(run.store, RUN, run.device, served=RUN)
    run.store.close()


def test_a_device_of_a_finished_run_is_forgotten_at_once(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=2)
    run.run(ask_in_round=99)
    before = run.state()
    assert all(files_with(run.directory, one) for one in run.sent)
    assert ask_to_forget(run.store, RUN, run.device, served=None)
    state = run.state()
    assert sorted(state["parts"]) == sorted({*before["parts"]} - {run.device})
    assert state["version"] != before["version"]
    assert [files_with(run.directory, one) for one in run.sent] == [[], []]
    assert ask_to_forget(run.store, RUN, run.device, served=None)
    assert len(run.store.history.events(RUN, "forgotten")) == 1
    with pytest.raises(ConfigurationError, match="run 'simulation' has no device 'nobody'"):
        ask_to_forget(run.store, RUN, "nobody", served=None)
    run.store.close()


# --- an extractor that comes with weights


def torchvision_stem(input_shape: Sequence[int]) -> nn.Module:
    """The first layers of a torchvision model, with weights that a training elsewhere would have given."""
    from torchvision.models import resnet18

    torch.manual_seed(5)
    model = resnet18(weights=None)
    return nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)


def any_module(input_shape: Sequence[int]) -> nn.Module:
    return OwnExtractor()


class OwnExtractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64 * 12).reshape(12, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.weight.T).relu()


class OnExtractor(nn.Module):
    """A model of an app's own: any extractor, and a linear layer."""

    def __init__(self, extractor: nn.Module, features: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(features, CLASSES))

    def features(self, x: Tensor) -> Tensor:
        return self.extractor(x)

    def predict(self, features: Tensor) -> Tensor:
        return self.head(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


@pytest.mark.parametrize(("factory", "channels", "features"), [(torchvision_stem, 3, 256), (any_module, 1, 12)])
def test_a_trained_extractor_is_taken_as_it_is(factory: Any, channels: int, features: int) -> None:
    server = make_server(f"{__name__}:{factory.__name__}", shape=(channels, 8, 8), extractor_rounds=0)
    given = copied(server.extractor)
    halves = {}
    for name, counts in (("a", [20, 12, 3, 0]), ("b", [0, 9, 14, 8])):
        model = OnExtractor(factory((channels, 8, 8)), features)
        data = rows_of(counts, seed=1)
        data = TensorData(data.inputs.expand(-1, channels, -1, -1).clone(), data.labels)
        local = Local(model=model, taps=check_local_model(model), data=data, classes=CLASSES, torch_device=CPU)
        halves[name] = AveragedDevice(config_of(extractor_rounds=0), local)
        model.extractor.load_state_dict(server.extractor.state_dict())  # as the initial weights do at check-in
    rounds = Rounds(server, halves).play(2)
    assert set(server.answer_kinds()) == {"summarise", "learn"}
    assert set(declared_parts(server.run_exchanges())) == {"statistics"}
    assert server.columns(server.config) == ["features", "counts"]
    assert [step for step, _, parts in rounds.asked if "extractor" in parts] == []
    for module in (server.extractor, *(half.local.taps.extractor for half in halves.values())):
        assert equal(copied(module), given)


# --- two answers, in whole runs


def softmax(values: Array) -> Array:
    return np.asarray(torch.from_numpy(values).double().softmax(dim=-1).numpy())


def test_the_personal_answer_is_the_product_of_both_predictors() -> None:
    rounds = fleet().play(3)
    half = rounds.halves["a"]
    inputs = half.local.data.inputs[:5]
    assert half.personal is not None
    general, personal = (softmax(extract(model, inputs).numpy()) for model in (half.local.model, half.personal))
    found = softmax(extract(half.variants()[PERSONAL], inputs).numpy())
    product = general * personal
    assert_allclose(found, product / product.sum(axis=1, keepdims=True), atol=1e-5)
    assert np.abs(general - personal).max() > 1e-3


def devices_of(prepared: Any, stack: ExitStack, api: DeviceApi) -> list[Device]:
    return [stack.enter_context(make_simulated(spec, MemoryLink(api))) for spec in prepared[1]]


def test_an_app_has_both_answers_and_their_files_before_and_after_a_restart(tmp_path: Path) -> None:
    prepared = prepare(RUNS["classstats averaged"], tmp_path / "work")
    store = Store.in_memory()
    delivered: list[tuple[dict[str, Any], nn.Module]] = []
    with ExitStack() as stack:
        devices = devices_of(prepared, stack, DeviceApi(store))

        def note(event: Event) -> None:
            if event.kind == "delivered":
                delivered.append((event.values, devices[0].model))

        devices[0]._guard.on_event = note
        asyncio.run(Engine(store, prepared[0], DriveDevices(devices, lambda: None)).run())
        assert delivered[0][0] == {}
        assert delivered[-1][0] == {"answer": "general"}
        assert all(model is devices[0].model for _, model in delivered)  # the app may hold it
        for device in devices:
            device.step(0.0)
            assert_both_in_one(device)
        found = [_outputs(device, load_arrays(prepared[1][0].test_file)[0]) for device in devices]
    with ExitStack() as stack:
        again = devices_of(prepared, stack, DeviceApi(store))
        inputs = load_arrays(prepared[1][0].test_file)[0]
        for device, before in zip(again, found, strict=True):
            after = _outputs(device, inputs)
            assert_both_in_one(device)
            assert sorted(after) == ["general", "model", "personal"]
            for name in after:
                assert_close(after[name], before[name], rtol=0, atol=0)
                session = onnxruntime.InferenceSession(str(device.state_dir / f"{name}.onnx"))
                assert_allclose(session.run(["logits"], {"input": inputs})[0], after[name].numpy(), atol=1e-4)
                metadata = session.get_modelmeta().custom_metadata_map
                assert metadata["answer"] == ("general" if name == "model" else name)
            assert torch.equal(after["model"], after["general"])
            assert not torch.equal(after["general"], after["personal"])
    store.close()


def assert_both_in_one(device: Device) -> None:
    """What the app's two models have in common is there once, in memory and on the disk."""
    models = device.models
    personal: Any = models["personal"]
    assert personal.first is models["general"]
    extractor = [one.data_ptr() for one in personal.first.extractor.parameters()]
    assert [one.data_ptr() for one in personal.second.extractor.parameters()] == extractor
    kept = {one.data_ptr(): one.nbytes for model in models.values() for one in model.state_dict().values()}
    assert (device.state_dir / "delivered.safetensors").stat().st_size < sum(kept.values()) + 30_000  # and names
    assert sum(kept.values()) == sum(one.nbytes for one in _of_both(personal))


def _of_both(personal: Any) -> list[Tensor]:
    return [*personal.first.state_dict().values(), *personal.second.predictor.state_dict().values()]


def _outputs(device: Device, inputs: Array) -> dict[str, Tensor]:
    with torch.no_grad():
        models = {"model": device.model, **device.models}
        return {name: model(torch.from_numpy(inputs)) for name, model in models.items()}


def test_both_answers_have_their_figures_in_the_store_and_the_report(tmp_path: Path) -> None:
    wanted = replace(
        SMALL, method="classstats", rounds=3, settings={"features": "averaged", "extractor_rounds": 1}, out=tmp_path
    )
    report = simulate(wanted)
    assert set(report.further) == {PERSONAL}
    assert {set(one.further) == {PERSONAL} for one in report.devices} == {True}
    written = json.loads((tmp_path / "report.json").read_text())["devices"][0]["further"][PERSONAL]
    assert written == report.devices[0].further[PERSONAL]
    for one in report.devices:
        by_round = report.further_accuracy_by_round[PERSONAL][one.name]
        assert by_round[0] is None
        assert by_round[-1] == one.further[PERSONAL]["accuracy"]
        assert all((tmp_path / file).exists() for file in one.onnx_answers.values())
        assert list(one.onnx_answers) == [GENERAL, PERSONAL]
    assert report.global_accuracy_by_round[0] is None
    assert all(rate is not None for rate in report.global_accuracy_by_round[1:])


def test_the_table_has_both_answers_of_every_device_and_fits_a_small_terminal(tmp_path: Path) -> None:
    wanted = replace(
        SMALL, method="classstats", rounds=2, settings={"features": "averaged", "extractor_rounds": 1}, out=tmp_path
    )
    report = simulate(replace(wanted, with_alone=True))
    console = Console(width=118, record=True, file=StringIO())
    console.print(report_table(report))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 100
    for one in (*report.devices, None):
        of = report.further if one is None else one.further
        above = next(number for number, line in enumerate(lines) if line.startswith(one.name if one else "mean"))
        general = (one.accuracy_fleet, one.own_accuracy_fleet) if one else (report.mean_accuracy_fleet,)
        assert all(f"{rate:.1%}" in lines[above] for rate in general)
        assert lines[above + 1].split() == ["personal", "answer", *(f"{rate:.1%}" for rate in of[PERSONAL].values())]


def test_with_validation_data_the_app_gets_the_answer_that_is_best_on_it(tmp_path: Path) -> None:
    wanted = Simulation(
        method="classstats",
        settings={"features": "averaged", "extractor_rounds": 1},
        devices=3,
        rounds=4,
        train_limit=300,
        test_limit=60,
        alpha=0.3,
        validation_share=0.3,
        with_alone=False,
        with_fedavg=False,
    )
    store = run_in_memory(prepare(wanted, tmp_path / "work"))
    figures = {
        name: {(row["round"], row["device"]): row for row in store.history.figures(RUN, name, "validation")}
        for name in ("accuracy", "personal/accuracy", "picked/general", "picked/personal", "replaced")
    }
    store.close()
    assert {number for number, _ in figures["picked/personal"]} == {2, 3, 4}
    for key, picked in figures["picked/personal"].items():
        rates = [figures[name][key]["sum"] for name in ("accuracy", "personal/accuracy")]
        expected = figures["replaced"][key]["sum"] * (rates[1] > rates[0])
        assert picked["sum"] == expected
        assert picked["sum"] + figures["picked/general"][key]["sum"] == figures["replaced"][key]["sum"]
    assert any(row["sum"] for row in figures["picked/personal"].values())
