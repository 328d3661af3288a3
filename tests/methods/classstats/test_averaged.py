"""Averaged class statistics: settings, extractor, summaries and their merge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support.averaged_fleet import devices_of, lesson_of
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
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, prepare
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import (
    ClassStatistics,
    ModelParameters,
    Parts,
)
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    from_wire,
    merge,
    shrink,
    summarise,
    to_wire,
)
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.model import check_local_model
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.methods.traffic import declared_parts
from fleetdistill_server.simulation.spec.arrays import load_arrays
from fleetdistill_server.store.store import Store

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
        ({"agreement_from": "server"}, "agreement_from is 'server', but agreement_every is 0.* set agreement_every"),
        ({"personal_extractor": "thawed"}, "unknown personal_extractor 'thawed', expected one of frozen, own"),
        ({"rate_drop_after": -1}, "rate_drop_after"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        AveragedConfig(**settings)


def test_an_extractor_of_random_weights_must_be_trained() -> None:
    with pytest.raises(ConfigurationError, match=r"extractor_rounds is 0, but the weights of \[model\] extractor"):
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
    with pytest.raises(
        ConfigurationError, match=rf"rounds is {rounds}, .* set rounds to at least {extractor_rounds + 1}, or lower"
    ):
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
    assert rounds.events == [("class-of-one-device", "classes [0, 2, 3] come from one device each; they are used")]
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
    half.local.data.inputs[:].mul_(1e7)
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
    assert event["text"].endswith(f"but the device declared {declared} samples")
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
    assert server.columns(server.config) == ["class_statistics", "counts"]
    assert [step for step, _, parts in rounds.asked if "extractor" in parts] == []
    for module in (server.extractor, *(half.local.taps.extractor for half in halves.values())):
        assert equal(copied(module), given)
