"""Class statistics in an app: files, figures, consent and features of its own."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from methods.classstats.class_statistics_fleet import CLASSES, SHAPE
from methods.classstats.one_exchange_fleet import SMALL, fleet, images_of, make_device, statistics_of
from numpy.testing import assert_allclose
from support.driving import DriveDevices
from support.open_device import open_device
from torch import nn

from fleetdistill import COLUMNS, Device, Event
from fleetdistill.device import Step
from fleetdistill.knowledge import (
    GENERAL,
    OWN,
    PERSONAL,
    Array,
)
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    OWN_KEPT,
    PERSONAL_LEAVE_ONE_OUT,
)
from fleetdistill.methods.classstats.shared_statistics import from_wire, merge, moments_of
from fleetdistill.models import build_model
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import extract
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views


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
            open_device(
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
    result = apps(DeviceApi(store), folder, events, **changes)
    asyncio.run(Engine(store, run_of(store, **method), DriveDevices(result, lambda: None)).run())
    for device in result:
        while device.step(0.0) is not Step.FINISHED:
            pass
    return result


def onnx_logits(file: Path, inputs: Array) -> Array:
    return np.asarray(onnxruntime.InferenceSession(str(file)).run(["logits"], {"input": inputs})[0])


@pytest.mark.long
def test_app_has_own_network_and_both_answers_as_whole_files(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    unseen = images_of([4, 4, 4, 4], 9).inputs
    for device in play(store, tmp_path, events, {}):
        assert set(device.models) == {OWN, GENERAL, PERSONAL}
        assert device.model is device.models[GENERAL]
        for name in (OWN, GENERAL, PERSONAL):
            with torch.no_grad():
                expected = device.models[name](unseen).numpy()
            result = onnx_logits(tmp_path / device.device_id / f"{name}.onnx", unseen.numpy())
            assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())
        whole = (tmp_path / device.device_id / "model.onnx").read_bytes()
        assert whole == (tmp_path / device.device_id / "general.onnx").read_bytes()
        device.close()
    store.close()


@pytest.mark.parametrize("judged", [False, True], ids=["no validation data", "validation data"])
def test_the_network_that_the_app_gave_is_not_trained(tmp_path: Path, judged: bool) -> None:
    """Neither by the fleet nor by the run's initial weights."""
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
    result = apps(DeviceApi(store), tmp_path, events, models, export="never", **changes)
    asyncio.run(Engine(store, config, DriveDevices(result, lambda: None)).run())
    for device, model in zip(result, given, strict=True):
        own, before = device.models[OWN].state_dict(), model.state_dict()
        assert {name for name, tensor in own.items() if not torch.equal(tensor, before[name])} == set()
        device.close()
    store.close()


def test_delivery_beside_app_network_is_not_called_replacement(tmp_path: Path) -> None:
    store, events = Store.in_memory(), list[Event]()
    for device in play(store, tmp_path, events, {}, export="never"):
        device.close()
    store.close()
    texts = {event.text for event in events if event.kind == "delivered"}
    assert texts == {"round 1: the variant in use is 'general'"}


@pytest.mark.long
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


def test_app_keeps_its_network_if_better_on_validation_data(tmp_path: Path) -> None:
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
    result = apps(DeviceApi(store), tmp_path, events, models, validation_data=shuffled, export="never")
    asyncio.run(Engine(store, run_of(store), DriveDevices(result, lambda: None)).run())
    assert isinstance(result[0].model, Zero)
    assert "kept" in {event.kind for event in events}
    for device in result:
        device.close()
    store.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_leave_one_out_reaches_server_only_if_app_allows_metrics(tmp_path: Path, allowed: bool) -> None:
    store, events = Store.in_memory(), list[Event]()
    allow = tuple(item for item in COLUMNS if allowed or item != "metrics")
    for device in play(store, tmp_path, events, {}, allow=allow, export="never"):
        device.close()
    names = (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT, OWN_KEPT)
    result = {name: {row.device for row in store.history.figures("one", name, "train")} for name in names}
    assert result == dict.fromkeys(names, {"d0", "d1"} if allowed else set())
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
    result = [
        open_device(
            server=MemoryLink(api),
            model=model,
            data=(rows[part::2], labels[part::2]),
            state_dir=tmp_path / f"d{part}",
            device_id=f"d{part}",
        )
        for part in (0, 1)
    ]
    asyncio.run(Engine(store, run_config(values), DriveDevices(result, lambda: None)).run())
    merged = merge(moments_of(rows[part::2], labels[part::2], 5) for part in (0, 1))
    space = make_space(merged, shrinkage_rule(16, merged.df))
    wanted = logits(space, coordinates(space, rows), CLASSES).argmax(axis=1)
    for device in result:
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
