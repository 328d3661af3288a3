"""The fleet's answer and the device's own, in whole runs."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.testing import assert_allclose
from rich.console import Console
from support.averaged_fleet import devices_of
from support.class_statistics_fleet import (
    fleet,
)
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, SMALL, prepare, run_in_memory
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill import Device, Event
from fleetdistill.knowledge import (
    GENERAL,
    PERSONAL,
    Array,
)
from fleetdistill.training.local_training import extract
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.fleet import simulate
from fleetdistill_server.simulation.report.table import report_table
from fleetdistill_server.simulation.spec.arrays import load_arrays
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store


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
        assert lines[above + 1].split() == ["personal", "model", *(f"{rate:.1%}" for rate in of[PERSONAL].values())]


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
