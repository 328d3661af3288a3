"""Test rows of the devices' own in whole simulations: own figures are those of the models on exactly these rows."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.confusions import dense, matrix
from support.fleets import RUNS, SMALL
from support.long import long_except
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.data.own import own_dataset
from fleetdistill_lab.simulation.fleet import Interrupted, simulate
from fleetdistill_lab.simulation.progress import Progress
from fleetdistill_lab.simulation.report.metrics import fairness_of
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.show import scored_line
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.score_log import ALONE, GLOBAL, read_scores
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

KINDS = ("fedavg", "feddkc", "feddkd", "feddkd with batch-norm on devices", "classstats", "cdkt", "fedd2s", "fedbn")
PARTS = ("local_split", "local_like", "local_labels")


def fleet(name: str, out: Path, **changes: Any) -> Simulation:
    """Four devices, of which a round takes two."""
    run = RUNS[name]
    few: dict[str, Any] = {"devices": 4, "devices_per_round": 2, "test_part": "local_split", "test_limit": None}
    return replace(run, **{**few, "train_limit": max(run.train_limit or 0, 240), "out": out, **changes})


def own_rows(report: FleetReport, out: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each device's own test rows, which follow each other in the test set."""
    inputs, labels = load_arrays(out / "work" / "test.npz")
    sizes = [device.own_test_rows or 0 for device in report.devices]
    assert sum(sizes) == len(labels) == report.scored["test_rows"]
    stops = np.cumsum(sizes)[:-1]
    return list(zip(np.split(inputs, stops), np.split(labels, stops), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", long_except(KINDS, "fedavg", "feddkc"))
def test_own_accuracy_is_of_the_written_model_on_own_rows(name: str, part: Any, tmp_path: Path) -> None:
    """The exported file of each device, run on the device's own rows with onnxruntime."""
    from onnxruntime import InferenceSession

    report = simulate(fleet(name, tmp_path, test_part=part, export="all"))
    assert report.test_part == part
    checked = 0
    for device, (inputs, labels) in zip(report.devices, own_rows(report, tmp_path), strict=True):
        if device.onnx_file is None or not len(labels):
            continue
        session = InferenceSession(tmp_path / device.onnx_file)
        (logits,) = session.run(None, {session.get_inputs()[0].name: inputs})
        assert device.own_accuracy_fleet == pytest.approx(np.mean(logits.argmax(axis=1) == labels))
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", long_except(("fedavg", "cdkt", "dafkd", "feddf"), "fedavg"))
def test_global_model_on_own_rows_adds_up_to_the_whole(name: str, tmp_path: Path) -> None:
    """The test set is the union of the devices' rows, on all of which the engine has scored the same model."""
    report = simulate(fleet(name, tmp_path))
    own = read_scores(tmp_path / "work" / "scores.jsonl", own=True)[GLOBAL]
    with closing(Store.open(tmp_path / "work" / "store")) as store:
        whole = store.runs.rounds(RUN)[-1].figures["global_confusion"]
    cells = np.sum([dense(of[0]) for of in own.values()], axis=0)
    assert matrix(cells).cells.tolist() == whole
    took_part = [device.name for device in report.devices if device.took_part]
    rates = [own[name][0].correct / own[name][0].count for name in took_part if name in own]
    (row,) = [row for row in report.comparison if row.name.endswith(" global")]
    assert row.own_accuracy == pytest.approx(np.mean(rates))


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(KINDS, "fedavg", "classstats"))
@pytest.mark.parametrize("score", ["sampled", "devices"])
def test_a_model_has_both_figures_or_neither(name: str, score: Any, tmp_path: Path) -> None:
    """And its matrix on the device's own rows is a part of that on all rows."""
    report = simulate(fleet(name, tmp_path, score=score, with_alone=True))
    own = [device for device in report.devices if device.own_test_rows]
    for device in own:
        for moment in ("fleet", "trained", "alone"):
            rates = getattr(device, f"accuracy_{moment}"), getattr(device, f"own_accuracy_{moment}")
            assert (rates[0] is None) == (rates[1] is None), (device.name, moment)
        assert all(figures["own_accuracy"] is not None for figures in device.further.values())
    log = tmp_path / "work" / "scores.jsonl"
    whole = read_scores(log)
    for variant, by_device in read_scores(log, own=True).items():
        for device_name, of in by_device.items():
            for number, counts in of.items() if variant not in (GLOBAL, ALONE) else ():
                assert np.less_equal(dense(counts), dense(whole[variant][device_name][number])).all()
    figures = report.scores["fleet"]["accuracy"]
    trained = [device.own_accuracy_trained for device in own if device.own_accuracy_trained is not None]
    assert figures["c_spec"] == pytest.approx(np.mean(trained))
    assert figures["c_spec"] == report.figures_by_round[-1]["c_spec"] == pytest.approx(report.mean_own_accuracy_trained)
    counted = [device for device in own if device.took_part or score == "devices"]
    alone = [device.own_accuracy_alone for device in counted if device.accuracy_fleet is not None]
    assert report.mean_own_accuracy_alone == pytest.approx(np.mean(alone))  # type: ignore[arg-type]
    assert report.comparison[0].own_accuracy == pytest.approx(report.mean_own_accuracy_alone)


@pytest.mark.parametrize("name", long_except(KINDS, "fedavg"))
def test_top_k_is_on_all_rows_and_fairness_on_own_rows(name: str, tmp_path: Path) -> None:
    """Among 9 of 10 classes the true one is found at least as often as with the first choice only."""
    wanted = fleet(name, tmp_path / "a", with_alone=True, with_fedavg=True)
    report = simulate(replace(wanted, top_k=9))
    for device in report.devices:
        for moment in ("fleet", "trained", "alone"):
            rate, top = getattr(device, f"accuracy_{moment}"), getattr(device, f"top_k_{moment}")
            assert (rate is None) == (top is None)
            assert rate is None or rate <= top <= 1
    for row in report.comparison:
        assert row.top_k is not None
        assert row.own_fairness is not None
    counted = [device for device in report.devices if device.took_part and device.accuracy_fleet is not None]
    own = [device.own_accuracy_alone for device in counted]
    assert report.comparison[0].own_fairness == fairness_of([rate for rate in own if rate is not None])
    plain = simulate(replace(wanted, out=tmp_path / "b"))
    assert report.scores == plain.scores
    assert [row.own_accuracy for row in report.comparison] == [row.own_accuracy for row in plain.comparison]


@pytest.mark.long
def test_devices_train_on_what_they_do_not_test_on(tmp_path: Path) -> None:
    """A fifth of the rows of each of four devices; the controls use the same rows."""
    wanted = fleet("feddkc", tmp_path, devices_per_round=0, with_alone=True, with_fedavg=True, partition="iid")
    report = simulate(wanted)
    assert [device.samples for device in report.devices] == [48] * 4
    assert [device.own_test_rows for device in report.devices] == [12] * 4
    train, test = (load_arrays(tmp_path / "work" / name)[0] for name in ("train.npz", "test.npz"))
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}
    assert report.scores["fedavg"]["accuracy"]["c_spec"] == report.mean_own_accuracy_fedavg_device
    by_name = {row.name: row for row in report.comparison}
    assert set(by_name) == {"alone", "feddkc", "FedAvg devices", "FedAvg global"}
    of_equal_size = report.mean_accuracy_fedavg_global
    assert by_name["FedAvg global"].own_accuracy == pytest.approx(of_equal_size), "equal parts of all test rows"
    assert "on 48 test rows" in scored_line(report)
    assert "own figures on each device's own rows (local_split)" in scored_line(report)


def test_a_device_without_test_rows_is_left_out_and_counted(tmp_path: Path) -> None:
    """Client 2 has no test rows."""
    rng = np.random.default_rng(0)
    labels, clients = np.arange(90) % 3, np.arange(90) // 30
    inputs = (rng.normal(size=(90, 1, 8, 8)) + 2 * labels[:, None, None, None]).astype(np.float32)
    data = own_dataset(
        {
            "train_inputs": inputs,
            "train_labels": labels,
            "test_inputs": inputs[:40],
            "test_labels": labels[:40],
            "train_clients": clients,
            "test_clients": np.arange(40) // 30,
        }
    )
    wanted = replace(
        SMALL, method="fedavg", devices=3, train_limit=None, test_limit=None, dataset=data, partition="by_client"
    )
    report = simulate(replace(wanted, test_part="local_client", models=("digits_linear",), out=tmp_path / "out"))
    assert [device.own_test_rows for device in report.devices] == [30, 10, 0]
    assert report.without_test_rows == 1
    assert report.devices[2].own_accuracy_fleet is None
    assert report.devices[2].accuracy_fleet is not None
    own = [device.own_accuracy_fleet for device in report.devices[:2]]
    assert report.mean_own_accuracy_fleet == pytest.approx(np.mean(own))  # type: ignore[arg-type]
    assert report.partition_parameters == {"devices": 3, "seed": 0}
    without = replace(data, test_clients=None)
    with pytest.raises(DataError, match="local_client needs a data set with train_clients and test_clients"):
        simulate(replace(wanted, dataset=without, test_part="local_client", out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def by_client(folder: Path, *words: str) -> str:
    """Simulates a data set with four clients of 30 rows; returns what is printed."""
    rows, clients = np.zeros((120, 1, 8, 8), np.float32), np.repeat([3, 5, 8, 9], 30)
    labels = np.arange(120) % 2
    parts: dict[str, Any] = {"test_inputs": rows[:20], "test_labels": labels[:20], "train_clients": clients}
    np.savez(folder / "own.npz", train_inputs=rows, train_labels=labels, **parts)
    fixed = ["--dataset", str(folder / "own.npz"), "--method", "no_transfer", "--rounds", "1", "--no-controls"]
    partition = ["--set", "simulation.partition=by_client", "--out", str(folder / "out")]
    told = CliRunner().invoke(app, ["simulate", *fixed, *partition, *words])
    return told.stdout if told.exit_code == 0 else told.stderr


def test_each_client_is_a_device_by_default(tmp_path: Path) -> None:
    assert "by_client, seed 0\n" in by_client(tmp_path, "--set", "simulation.devices_per_round=4")
    assert len(json.loads((tmp_path / "out/report.json").read_text())["devices"]) == 4
    assert "devices_per_round is 5, must be 0" in by_client(
        tmp_path, "--overwrite", "--set", "simulation.devices_per_round=5"
    )


def test_clients_without_a_device_are_counted(tmp_path: Path) -> None:
    said = by_client(tmp_path, "--devices", "3")
    assert "by_client, seed 0; 1 of 4 clients with 30 rows have no device\n" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_part": "local"}, "unknown test part 'local'"),
        ({"test_part": "local_like", "score_rows": 10}, "score_rows has no effect with test_part local_like"),
        ({"test_part": "local_split", "test_limit": 10}, "test_limit has no effect with test_part local_split"),
        ({"test_part": "local_client"}, "but the partition is dirichlet_by_class; use by_client"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_settings(replace(Simulation(), **changes))
    assert message in str(refused.value)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("change", [{"workers": 2}, {"link": "grpc"}, {"durable": True}], ids=str)
def test_own_figures_do_not_depend_on_where_devices_run(change: dict[str, Any], tmp_path: Path) -> None:
    here, there = (
        simulate(fleet("feddkc", tmp_path / name, test_part="local_like", **changes))
        for name, changes in (("here", {}), ("there", change))
    )
    assert here.scores == there.scores
    assert [one.own_accuracy_fleet for one in here.devices] == [one.own_accuracy_fleet for one in there.devices]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"score": "none"},
        {"score": "global", "with_fedavg": True},
        {"validation_share": 0.25, "score": "devices"},
        {"hostile": 1, "attack": "flips"},
        {"proxy_per_class": 2, "test_part": "local_labels"},
    ],
    ids=str,
)
def test_other_settings_work_with_own_test_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    """A figure is missing where the model is not scored, and nowhere else."""
    report = simulate(fleet("fedavg", tmp_path, **changes))
    score = changes.get("score", "sampled")
    assert any(device.accuracy_fleet is not None for device in report.devices) == (score in ("sampled", "devices"))
    for device in report.devices:
        if device.own_test_rows:
            assert (device.own_accuracy_fleet is None) == (device.accuracy_fleet is None)
    of_global = [row.own_accuracy for row in report.comparison if row.name == "FedAvg global"]
    assert None not in of_global
    assert len(of_global) == (score != "none")


@pytest.mark.long
def test_interrupted_and_resumed_figures_are_the_same(tmp_path: Path) -> None:
    """The global model's own accuracy is known at the end only."""

    def stop(progress: Progress) -> None:
        if progress.completed == 1:
            raise KeyboardInterrupt

    whole = simulate(fleet("fedavg", tmp_path / "whole", with_alone=True))
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted) as interrupted:
        simulate(fleet("fedavg", out, with_alone=True), stop)
    early = interrupted.value.report
    assert early is not None
    assert early.scores["fleet"]["accuracy"]["c_spec"] is not None
    assert [device.own_accuracy_fleet for device in early.devices] == [None] * 4
    again = simulate(fleet("fedavg", out, with_alone=True), if_there="resume")
    assert again.scores == whole.scores
    assert [replace(device, onnx_file="") for device in again.devices] == [
        replace(device, onnx_file="") for device in whole.devices
    ]
