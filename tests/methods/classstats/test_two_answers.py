"""The fleet's answer and the device's own, in whole runs."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.driving import DriveDevices
from support.fleets import RUN, SMALL, prepare, run_in_memory
from torch import nn

from fleetdistill import Device, Event
from fleetdistill.knowledge import GENERAL, OWN, PERSONAL
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.show import report_table
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

WANTED = replace(SMALL, method="classstats", rounds=1)


def test_what_both_answers_share_is_stored_once(tmp_path: Path) -> None:
    prepared = prepare(replace(WANTED, settings={"features": "model"}), tmp_path / "work")
    store, delivered = Store.in_memory(), list[tuple[object, nn.Module]]()
    api = DeviceApi(store)
    with ExitStack() as stack:
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in prepared[1]]

        def note(event: Event) -> None:
            if event.kind == "delivered":
                delivered.append((event.values, devices[0].model))

        devices[0]._lock.on_event = note
        asyncio.run(Engine(store, prepared[0], DriveDevices(devices, lambda: None)).run())
        assert [values for values, _ in delivered] == [{"answer": GENERAL}]
        assert all(model is devices[0].model for _, model in delivered), "the app may hold it"
        for device in devices:
            device.step(0.0)
            assert_shared(device)
    with ExitStack() as stack:
        for spec in prepared[1]:
            assert_shared(stack.enter_context(make_device(spec, MemoryLink(api))))
    store.close()


def assert_shared(device: Device) -> None:
    """The extractor of both answers is there once, in memory and on the disk."""
    models = device.models
    assert sorted(models) == sorted((OWN, GENERAL, PERSONAL))
    extractors = [
        [item.data_ptr() for item in models[name].fixed.extractor.state_dict().values()] for name in (GENERAL, PERSONAL)
    ]
    assert extractors[0] == extractors[1]
    assert extractors[0]
    kept = {item.data_ptr(): item.nbytes for model in models.values() for item in model.state_dict().values()}
    assert (device.state_dir / "delivered.safetensors").stat().st_size < sum(kept.values()) + 30_000  # and names
    assert not torch.equal(models[GENERAL].above.temperature, models[PERSONAL].above.temperature) or not torch.equal(
        models[GENERAL].above.log_prior, models[PERSONAL].above.log_prior
    )


@pytest.mark.long
def test_both_answers_have_figures_in_store_and_report(tmp_path: Path) -> None:
    report = simulate(replace(WANTED, export="all", out=tmp_path))
    assert set(report.further) == {PERSONAL}
    assert {set(device.further) == {PERSONAL} for device in report.devices} == {True}
    written = json.loads((tmp_path / "report.json").read_text())["devices"][0]["further"][PERSONAL]
    assert written == report.devices[0].further[PERSONAL]
    for device in report.devices:
        by_round = report.further_accuracy_by_round[PERSONAL][device.name]
        assert by_round[-1] == device.further[PERSONAL]["accuracy"]
        assert all((tmp_path / file).exists() for file in device.onnx_answers.values())
        assert list(device.onnx_answers) == [GENERAL, PERSONAL]
    assert all(rate is not None for rate in report.global_accuracy_by_round)


@pytest.mark.long
def test_table_with_both_answers_per_device_fits_small_terminal(tmp_path: Path) -> None:
    report = simulate(replace(WANTED, with_alone=True, out=tmp_path))
    console = Console(width=118, record=True, file=StringIO())
    console.print(report_table(report))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 100
    for item in (*report.devices, None):
        of = report.further if item is None else item.further
        above = next(number for number, line in enumerate(lines) if line.startswith(item.name if item else "mean"))
        general = (item.accuracy_fleet, item.own_accuracy_fleet) if item else (report.mean_accuracy_fleet,)
        assert all(f"{rate:.1%}" in lines[above] for rate in general)
        below = [line.split() for line in lines[above + 1 : above + 3]]
        assert ["personal", "model", *(f"{rate:.1%}" for rate in of[PERSONAL].values())] in below


def test_app_gets_answer_that_is_best_on_validation_data(tmp_path: Path) -> None:
    wanted = Simulation(
        method="classstats",
        devices=3,
        rounds=1,
        train_limit=300,
        test_limit=60,
        alpha=0.3,
        validation_share=0.3,
        with_alone=False,
        with_fedavg=False,
    )
    store = run_in_memory(prepare(wanted, tmp_path / "work"))
    figures = {
        name: {(row.round, row.device): row for row in store.history.figures(RUN, name, "validation")}
        for name in ("accuracy", "personal/accuracy", "picked/general", "picked/personal", "replaced")
    }
    store.close()
    assert len(figures["picked/personal"]) == 3
    for key, picked in figures["picked/personal"].items():
        rates = [figures[name][key].sum for name in ("accuracy", "personal/accuracy")]
        expected = figures["replaced"][key].sum * (rates[1] > rates[0])
        assert picked.sum == expected
        assert picked.sum + figures["picked/general"][key].sum == figures["replaced"][key].sum
    assert any(row.sum for row in figures["picked/personal"].values())
