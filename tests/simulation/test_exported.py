"""`export`: the devices whose models a simulation writes as ONNX, and what the files answer."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.fleets import MECHANISMS, ROUNDS_OF_ANY_SIZE, RUNS, SMALL
from support.long import long_except
from support.onnx_traces import traced_models
from typer.testing import CliRunner

from fleetdistill.knowledge import DELIVER
from fleetdistill.methods import device_class
from fleetdistill.training.onnx_graphs import Graphs
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.fleet import Interrupted, simulate
from fleetdistill_lab.simulation.folder import saved_simulation
from fleetdistill_lab.simulation.progress import Progress
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

FLEET = replace(
    SMALL,
    method="feddkc",
    devices=7,
    devices_per_round=3,
    rounds=2,
    train_limit=210,
    test_limit=60,
    models=("digits_linear", "digits_mlp_small"),
)
"""Seven devices of two architectures, of which some take no part."""
TRACED = ("classstats in one exchange", "classstats with a trained predictor", "fedd2s", "feddkc", "fedper", "fedproto")
"""Runs that have between them every kind of graph."""


def accuracy_of(file: Path, scored: Path) -> float:
    inputs, labels = load_arrays(scored)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input": inputs})
    return float((logits.argmax(axis=1) == labels).mean())


def trained(out: Path) -> list[str]:
    """The devices that took part, in order."""
    with closing(Store.open(out / "work" / "store")) as store:
        return sorted({row.device for row in store.asks.uploads(RUN) if row.step != DELIVER})


def written(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*.onnx")}


def check_devices(export: Any, report: FleetReport, part: list[str]) -> None:
    """Checks which devices of those that took part have a file."""
    devices = [device for device in report.devices if device.name in part]
    chosen = [device for device in report.devices if device.onnx_file is not None]
    assert {device.name for device in chosen} <= set(part)
    if export in ("one", "best"):
        assert sorted(device.model for device in chosen) == sorted({device.model for device in devices})
    else:
        count = {"all": len(devices), "none": 0}.get(export, export)
        assert chosen == devices[:count]
    if export == "best":
        rates = [(device.model, device.accuracy_fleet or 0.0) for device in devices]
        best = {device.model: max(rate for model, rate in rates if model == device.model) for device in chosen}
        assert {device.model: device.accuracy_fleet for device in chosen} == best


@pytest.mark.long
@pytest.mark.parametrize("method", long_except(["feddkc", "fedavg", "classstats"], "fedavg"))
@pytest.mark.parametrize("export", ["one", "best", "all", "none", 1, 3, 100])
def test_each_value_writes_the_models_of_its_devices(export: Any, method: str, tmp_path: Path) -> None:
    models = FLEET.models if method != "fedavg" else ("digits_linear",)
    report = simulate(replace(FLEET, method=method, models=models, export=export, out=tmp_path))
    part = trained(tmp_path)
    assert 3 <= len(part) < 7
    check_devices(export, report, part)
    names = {file for device in report.devices for file in (device.onnx_file, *device.onnx_answers.values()) if file}
    assert written(tmp_path) == names
    for device in report.devices:
        assert (device.onnx_max_difference is None) == (device.onnx_file is None)
        assert device.onnx_file in (None, f"onnx/{device.name}.onnx")
        assert list(device.onnx_answers) == (
            ["general", "personal"] if method == "classstats" and device.onnx_file else []
        )
    assert json.loads((tmp_path / "report.json").read_text())["devices"][0]["onnx_file"] == report.devices[0].onnx_file


@pytest.mark.parametrize("name", long_except(ROUNDS_OF_ANY_SIZE, "fedavg", "feddkc", long=MECHANISMS))
@pytest.mark.parametrize("share", [0.0, 0.3], ids=["takes", "chooses"])
def test_a_files_accuracy_is_the_devices(name: str, share: float, tmp_path: Path) -> None:
    """Also of devices that took part in the first round only, or may keep the model that they had."""
    rows = max(RUNS[name].train_limit or 0, 200)
    wanted = replace(RUNS[name], devices=4, devices_per_round=2, train_limit=rows, test_limit=100, export="all")
    report = simulate(replace(wanted, validation_share=share, score_rows=60, out=tmp_path))
    scored = tmp_path / "work" / "scored.npz"
    if device_class(RUNS[name].method).shares_fleet_model and not share:
        scored = tmp_path / "work" / "test.npz"  # the engine scores the one model that all devices have
    part = trained(tmp_path)
    assert {device.name for device in report.devices if device.onnx_file} == set(part)
    for device in report.devices:
        if device.onnx_file is not None:
            assert device.accuracy_fleet == pytest.approx(accuracy_of(tmp_path / device.onnx_file, scored), abs=1e-9)
        for variant, file in ({} if share else device.onnx_answers).items():
            rate = accuracy_of(tmp_path / file, scored)
            own = device.accuracy_fleet if variant == "general" else device.further[variant]["accuracy"]
            assert own == pytest.approx(rate, abs=1e-9)


@pytest.mark.parametrize("name", long_except(RUNS, "fedavg", long=TRACED))
def test_an_architecture_is_traced_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the files answer like those that are traced each for itself."""
    traced = traced_models(monkeypatch)
    wanted = replace(RUNS[name], devices=6, train_limit=max(RUNS[name].train_limit or 0, 300), out=tmp_path)
    simulate(replace(wanted, export="all"))
    assert len(traced) == len(set(traced))
    filled, once = {file: (tmp_path / file).read_bytes() for file in written(tmp_path)}, len(traced)
    monkeypatch.setattr(Graphs, "write", lambda *given: False)
    simulate(replace(wanted, export="all"), if_there="resume")
    assert len(traced) - once > once
    inputs = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    for file, data in filled.items():
        own, other = (
            onnxruntime.InferenceSession(model).run(["logits"], {"input": inputs})[0]
            for model in (data, (tmp_path / file).read_bytes())
        )
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("durable", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("score", long_except(["sampled", "devices", "global", "none"], "sampled"))
def test_files_do_not_depend_on_what_is_scored(score: Any, durable: bool, tmp_path: Path) -> None:
    """Nor on where the devices' states are."""
    one, other = tmp_path / "one", tmp_path / "other"
    wanted = replace(FLEET, method="cdkt", devices=4, export="all")
    simulate(replace(wanted, out=one))
    simulate(replace(wanted, score=score, durable=durable, out=other))
    assert written(one) == written(other) != set()
    inputs = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    for name in written(one):
        answers = [
            onnxruntime.InferenceSession(str(out / name)).run(["logits"], {"input": inputs}) for out in (one, other)
        ]
        assert np.array_equal(*answers)


@pytest.mark.long
def test_a_finished_simulation_can_export_more_later(tmp_path: Path) -> None:
    wanted = replace(FLEET, export="none", out=tmp_path)
    first = simulate(wanted)
    assert written(tmp_path) == set()
    later = simulate(replace(wanted, export="all"), if_there="resume")
    assert written(tmp_path) == {f"onnx/{name}.onnx" for name in trained(tmp_path)}
    assert [replace(device, onnx_file=None, onnx_max_difference=None) for device in later.devices] == first.devices
    assert later.accuracy_by_round == first.accuracy_by_round


@pytest.mark.long
def test_an_interrupted_simulation_exports_nothing_yet(tmp_path: Path) -> None:
    wanted = replace(FLEET, export="all", out=tmp_path)

    def press(done: Progress) -> None:
        if (done.phase, done.completed) == ("fleet", 1):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as interrupted:
        simulate(wanted, press)
    assert interrupted.value.report is not None
    assert all(device.onnx_file is None for device in interrupted.value.report.devices)
    assert written(tmp_path) == set()
    report = simulate(wanted, if_there="resume")
    assert {device.name for device in report.devices if device.onnx_file} == set(trained(tmp_path))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("sampled", None, None, "one")),
        (["--score", "devices", "--score-every", "3", "--score-rows", "50"], ("devices", 3, 50, "one")),
        (["--export", "all"], ("sampled", None, None, "all")),
        (["--export", "4"], ("sampled", None, None, 4)),
        (["--set", "simulation.export=4", "--set", "simulation.score=none"], ("none", None, None, 4)),
    ],
)
def test_the_command_line_sets_scores_and_exports(
    words: list[str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Simulation] = []
    monkeypatch.setattr(show, "simulate_and_show", lambda one, **options: wanted.append(one))
    done = CliRunner().invoke(app, ["simulate", *words])
    assert done.exit_code == 0, done.output
    (one,) = wanted
    assert (one.score, one.score_every, one.score_rows, one.export) == expected


@pytest.mark.long
@pytest.mark.parametrize("export", ["best", 2])
def test_the_folder_keeps_what_is_to_be_exported(export: Any, tmp_path: Path) -> None:
    simulate(replace(FLEET, devices=3, rounds=1, train_limit=90, export=export, out=tmp_path))
    assert saved_simulation(tmp_path).export == export
