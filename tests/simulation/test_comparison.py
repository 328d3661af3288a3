"""The comparison of a method with its controls: rows by hand, what a report has, and the demo."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.comparison import (
    Candidate,
    ComparisonRow,
    Cost,
    candidates,
    comparison_table,
    local_only,
)
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.show import expected_lines, summary_line
from fleetdistill_lab.simulation.spec.settings import Simulation

ROOT = Path(__file__).parents[2]
KNOWS_0 = np.array([[10, 0], [10, 0]])  # says 0 of everything: half of all, all of class 0
KNOWS_BOTH = np.array([[10, 0], [0, 10]])
SAMPLES = np.array([[5, 0], [5, 5]])
COST = Cost([{"up": 10.0, "down": 5.0}, {"up": 0.0, "down": 1.0}], exchanges=2.0)


def test_a_row_by_hand() -> None:
    """The first device has class 0 alone: .5 on all, 1 on own classes; the second both: .5 and .5."""
    row = Candidate("m", [[KNOWS_BOTH, KNOWS_0]] * 2, SAMPLES, COST).row()
    assert row == ComparisonRow("m", accuracy=0.5, own_accuracy=0.75, bytes=16.0, exchanges=2.0)


def test_a_global_model_is_scored_on_every_devices_own_classes() -> None:
    whole = Candidate("m global", [[KNOWS_0]], SAMPLES, COST, is_global=True)
    assert (whole.row().accuracy, whole.row().own_accuracy) == (0.5, 0.75)
    assert whole.curve().devices == []


def test_a_curve_is_over_bytes_so_far_and_waits_for_an_answer() -> None:
    curve = Candidate("m personal", [[None, KNOWS_0], [None, KNOWS_BOTH]], SAMPLES, COST).curve()
    assert curve.bytes == [15.0, 16.0]
    assert curve.accuracy == [None, 0.75]
    assert curve.devices == [0.5, 1.0]


def test_training_alone_costs_nothing() -> None:
    row = local_only([[KNOWS_0], [KNOWS_BOTH]], SAMPLES).row()
    assert row == ComparisonRow("alone", accuracy=0.75, own_accuracy=1.0, bytes=0.0, exchanges=0.0)


@pytest.mark.parametrize(
    ("method", "server", "further", "names"),
    [
        ("feddkc", None, {}, ["feddkc"]),
        ("dafkd", KNOWS_0, {}, ["dafkd", "dafkd global"]),
        ("fedavg", KNOWS_0, {}, ["FedAvg devices", "FedAvg global"]),
        (
            "classstats",
            KNOWS_0,
            {"personal": {"b": [KNOWS_BOTH]}},
            ["class statistics general", "class statistics personal", "class statistics global"],
        ),
    ],
)
def test_what_a_method_puts_into_the_comparison(method: str, server: Any, further: Any, names: list[str]) -> None:
    devices = {"a": [KNOWS_0], "b": [KNOWS_BOTH]}
    history = FleetHistory(devices, {"a": [True], "b": [True]}, [server], further)
    result = candidates(method, history, SAMPLES, Cost(COST.bytes_by_round[:1], 2.0))
    assert [item.name for item in result] == names
    if further:
        assert result[1].row().accuracy == 1.0  # device a, which lacks that answer, does not count


def test_global_model_on_every_device_is_no_row_of_its_own() -> None:
    history = FleetHistory({"a": [KNOWS_0], "b": [KNOWS_0]}, {"a": [True], "b": [True]}, [KNOWS_0])
    cost = Cost(COST.bytes_by_round[:1], 2.0)
    assert [candidate.name for candidate in candidates("classstats", history, SAMPLES, cost)] == ["class statistics"]


def test_the_table_fits_a_terminal_and_says_what_is_not_scored() -> None:
    rows = [ComparisonRow("class statistics personal", None, 0.5, 12_345_678.0, 31.0), ComparisonRow("a", 1, 1, 0, 0)]
    console = Console(width=100, file=io.StringIO())
    console.print(comparison_table(rows))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "class statistics personal" in said
    assert "not scored" in said
    assert "12.35 MB" in said
    assert "…" not in said
    assert max(len(line.rstrip()) for line in said.splitlines()) < 100


# --- a report


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> FleetReport:
    out = tmp_path_factory.mktemp("exchanged")
    return simulate(Simulation(method="classstats", devices=2, train_limit=200, control_rounds=2, seed=3, out=out))


@pytest.mark.long
def test_a_report_compares_the_exchange_with_every_control(exchanged: FleetReport) -> None:
    rows = {item.name: item for item in exchanged.comparison}
    assert list(rows) == [
        "alone",
        "class statistics general",
        "class statistics personal",
        "FedAvg devices",
        "FedAvg global",
    ]
    assert (rows["alone"].accuracy, rows["alone"].own_accuracy) == pytest.approx(
        (exchanged.mean_accuracy_alone, exchanged.mean_own_accuracy_alone)
    )
    general, personal = rows["class statistics general"], rows["class statistics personal"]
    own = (exchanged.mean_accuracy_fleet, exchanged.mean_own_accuracy_fleet)
    assert (general.accuracy, general.own_accuracy) == pytest.approx(own)
    further = exchanged.further["personal"]
    assert (personal.accuracy, personal.own_accuracy) == pytest.approx((further["accuracy"], further["own_accuracy"]))
    assert general.exchanges == personal.exchanges == 1  # the answer to the space has no tensors
    assert general.bytes == sum(device.bytes_up + device.bytes_down for device in exchanged.devices) / 2
    fedavg = (exchanged.mean_accuracy_fedavg_device, exchanged.mean_own_accuracy_fedavg_device)
    assert (rows["FedAvg devices"].accuracy, rows["FedAvg devices"].own_accuracy) == pytest.approx(fedavg)
    assert rows["FedAvg global"].accuracy == pytest.approx(exchanged.mean_accuracy_fedavg_global)
    assert rows["FedAvg global"].exchanges == 2  # a round each; the last mean is brought beside them
    assert rows["FedAvg global"].bytes > 10 * general.bytes


def test_the_fleet_expects_what_its_devices_do_by_rows(exchanged: FleetReport) -> None:
    assert exchanged.leave_one_out is not None
    for answer, rate in exchanged.leave_one_out.items():
        told = [(device.leave_one_out or {})[answer] for device in exchanged.devices]
        assert rate == pytest.approx(np.average(told, weights=[device.samples for device in exchanged.devices]))
    (line,) = expected_lines(exchanged)
    assert f"general model {exchanged.leave_one_out['general']:.1%}" in line
    assert all(device.own_statistics_kept in (True, False) for device in exchanged.devices)


def test_the_summary_says_how_long_devices_local_only(exchanged: FleetReport) -> None:
    assert "than devices that train alone for 2 rounds" in summary_line(exchanged)


def test_a_method_without_such_figures_expects_nothing(tmp_path: Path) -> None:
    without: dict[str, Any] = {"with_alone": False, "with_fedavg": False}
    report = simulate(
        Simulation(method="feddkc", devices=2, train_limit=60, test_limit=20, rounds=1, out=tmp_path, **without)
    )
    assert report.leave_one_out is None
    assert (
        {device.leave_one_out for device in report.devices}
        == {device.own_statistics_kept for device in report.devices}
        == {None}  # type: ignore[comparison-overlap]
    )
    assert expected_lines(report) == []
    assert [item.name for item in report.comparison] == ["feddkc"]


@pytest.mark.parametrize("settings", [{"predictor": "space_mlp_16"}, {"predictors": ("space_huge",)}])
def test_an_unknown_predictor_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    wanted = Simulation(method="classstats", devices=2, out=tmp_path)
    changes = {"settings": settings} if "predictor" in settings else settings
    with pytest.raises(ConfigurationError, match=r"(?i)predictor.*expected"):
        simulate(Simulation(**{**vars(wanted), **changes}))


# --- the demo


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL: dict[str, Any] = {"devices": 2, "train_limit": 200, "test_limit": 60, "seed": 3}


@pytest.mark.long
@pytest.mark.pictures
def test_demo_ends_with_method_controls_and_one_exchange(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo().demo(Simulation(method="feddkc", rounds=2, out=tmp_path, **SMALL))
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    names = [item["name"] for item in report["comparison"]]
    assert names == [
        *("alone", "feddkc", "FedAvg devices", "FedAvg global"),
        *("class statistics general", "class statistics personal"),
    ]
    assert [item["name"] for item in report["curves"]] == names[1:]
    assert report["method"] == "feddkc"
    lines = [line for line in said.splitlines() if line.strip()]
    assert lines[-1] == f"{tmp_path}/: report.json, fleet.png, onnx/ (2 models)"
    assert [line[: len(name)] for line, name in zip(lines[-7:-1], names, strict=True)] == names
    exchange = json.loads((tmp_path / "classstats" / "report.json").read_text())
    assert exchange["comparison"] == report["comparison"][-2:]
    same = ("dataset", "partition", "partition_parameters", "seed", "link", "proxy_per_class")
    assert {name: exchange[name] for name in same} == {name: report[name] for name in same}
    for name in ("model", "samples_by_class"):
        assert [item[name] for item in exchange["devices"]] == [item[name] for item in report["devices"]]


@pytest.mark.long
def test_the_demo_of_class_statistics_makes_no_second_exchange(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo().demo(Simulation(method="classstats", control_rounds=2, out=tmp_path, **SMALL))
    assert "The same fleet with one exchange" not in capsys.readouterr().out
    assert not (tmp_path / "classstats").exists()


@pytest.mark.long
def test_demo_exchange_has_the_data_left_by_proxy_set(tmp_path: Path) -> None:
    script, wanted = demo(), Simulation(method="cdkt", rounds=1, out=tmp_path, with_fedavg=False, **SMALL)
    report = simulate(wanted)
    exchange = script.same_fleet(wanted, report, tmp_path / "exchange")
    assert exchange.proxy_per_class == report.proxy_per_class == 8
    assert (
        sum(device.samples for device in simulate(exchange).devices)
        == sum(device.samples for device in report.devices)
        == 120
    )
