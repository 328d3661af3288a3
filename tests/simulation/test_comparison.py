"""The comparison of a method with its controls: rows by hand, what a report has, and the demo."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.confusions import matrix

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import DELIVER
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.comparison import (
    Candidate,
    ComparisonRow,
    Cost,
    Spent,
    candidates,
    comparison_table,
    devices_lines,
    local_only,
    spent_by_round,
    spent_to,
)
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.metrics import Fairness
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.show import expected_lines, scored_line, summary_line
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.store.records import Traffic, Upload
from fleetdistill_server.store.states import UploadStatus

ROOT = Path(__file__).parents[2]
KNOWS_0 = matrix([[10, 0], [10, 0]])  # says 0 of everything: half of all, all of class 0
KNOWS_BOTH = matrix([[10, 0], [0, 10]])
SAMPLES = np.array([[5, 0], [5, 5]])
COST = Cost([{"up": 10.0, "down": 5.0}, {"up": 0.0, "down": 1.0}], exchanges=2.0)


def test_a_row_by_hand() -> None:
    """The first device has class 0 alone: .5 on all, 1 on own classes; the second both: .5 and .5."""
    row = Candidate("m", [[KNOWS_BOTH, KNOWS_0]] * 2, SAMPLES, COST).row()
    assert replace(row, fairness=None, own_fairness=None) == ComparisonRow("m", 0.5, 0.75, 16.0, 2.0, devices=2)
    assert row.fairness == Fairness(bins=[0, 0, 0, 0, 0, 2, 0, 0, 0, 0], std=0.0, worst=0.5, jain=1.0)
    assert row.own_fairness == Fairness(bins=[0, 0, 0, 0, 0, 1, 0, 0, 0, 1], std=0.25, worst=0.5, jain=0.9)


def test_a_row_says_over_how_many_devices_its_means_are() -> None:
    """Of three devices one was not scored, and one never took part: its model is the initial one."""
    samples = np.vstack([SAMPLES, [1, 1]])
    took_part = [True, True, False]
    row = Candidate("m", [[KNOWS_BOTH], [None], [KNOWS_0]], samples, COST, took_part=took_part).row()
    assert (row.accuracy, row.devices, row.untrained) == (0.75, 2, 1)
    assert row.fairness is not None
    assert sum(row.fairness.bins) == 2


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
    assert (row.name, row.accuracy, row.own_accuracy, row.bytes, row.exchanges) == ("alone", 0.75, 1.0, 0.0, 0.0)


def oracle(rounds: int, first_exchanges: int, later: int) -> list[Spent]:
    """One exchange in each of the first rounds, and `later` in each of the others."""
    so_far = itertools.accumulate(1 if number <= first_exchanges else later for number in range(1, rounds + 1))
    nothing = dict.fromkeys([field.name for field in fields(Spent)], 0)
    return [Spent(**{**nothing, "exchanges": number}) for number in so_far]


@pytest.mark.parametrize(("rounds", "without", "exchanges"), [(271, 0, 1084), (110, 30, 350)])
def test_exchanges_to_a_target_are_those_of_feddkd(rounds: int, without: int, exchanges: int) -> None:
    """1 + J exchanges a round with J = 3, as the paper prints them for CIFAR-10 and CIFAR-100."""
    curve = [0.1] * (rounds - 1) + [0.9] + [0.2] * 5
    result = spent_to(curve, oracle(rounds + 5, without, 4), 0.9)
    assert result is not None
    assert result.exchanges == exchanges
    assert spent_to(curve, oracle(rounds + 5, without, 4), 0.91) is None


def test_what_a_run_has_spent_by_hand() -> None:
    """Round 2 is short and counts in round 3; `a` answers two asks of round 1 with tensors, `b` one of them."""
    sent = [
        *(Traffic(0, "a", "down", "", 1, 100, 5, 0), Traffic(1, "a", "up", "", 1, 10, 1, 0)),
        *(Traffic(2, "b", "up", "", 1, 20, 2, 0), Traffic(3, "b", "up", "", 1, 40, 4, 0)),
        *(Traffic(3, "a", "down", "", 1, 200, 6, 0), Traffic(4, "a", "down", "", 1, 400, 7, 0)),
        Traffic(3, "c", "up", "refused", 0, 0, 0, 50),
    ]
    uploads = [
        *(upload(1, "a", ask=1), upload(1, "b", ask=2), upload(1, "a", ask=3), upload(1, "b", ask=4, data_bytes=0)),
        *(upload(2, "b", ask=5), upload(3, "a", ask=6), upload(3, "a", ask=7, step=DELIVER)),
    ]
    steps = {("a", 1): 10, ("b", 1): 20, ("b", 2): 7, ("a", 3): 3, ("c", 3): 100}
    first, second = spent_by_round(sent, uploads, steps, [1, 3])
    assert (first.exchanges, first.steps) == (1.5, 15)
    assert (second.exchanges, second.steps) == (1.5 + 1 + 1, 15 + 7 + 3), "the answer of `c` was refused"
    bytes_ = ("tensor_bytes_up", "tensor_bytes_down", "envelope_bytes_up", "envelope_bytes_down")
    assert [getattr(first, name) for name in bytes_] == [10, 100, 1, 5]
    assert [getattr(second, name) for name in bytes_] == [70, 300, 7, 11]
    assert (first.refused_bytes_up, second.refused_bytes_up) == (0, 50)


def upload(number: int, device: str, ask: int, step: str = "train", data_bytes: int = 8) -> Upload:
    row = (number, step, 1, device, f"{ask}", ask, 1, b"", data_bytes, 1, 0.0, UploadStatus.USED, "", None)
    return Upload(*row)


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


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_table_fits_a_terminal_and_says_what_is_not_scored(top_k: int | None) -> None:
    first = row("class statistics personal", accuracy=None, bytes=12_345_678.0, exchanges=31.0, top_k=0.987)
    console = Console(width=90 if top_k else 80, file=io.StringIO())
    console.print(comparison_table([first, row("a", accuracy=1, top_k=1)], top_k))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "class statistics personal" in said
    assert "not scored" in said
    assert "12.35 MB" in said
    assert ("top 5" in said, "98.7%" in said) == (top_k == 5, top_k == 5)
    assert "…" not in said
    assert max(len(line.rstrip()) for line in said.splitlines()) < console.width


def test_means_over_some_devices_are_told() -> None:
    rows = [row("alone", devices=100, untrained=69), row("FedAvg devices", devices=31), row("a", devices=100)]
    (line,) = devices_lines(rows, 100)
    assert line.endswith("of 100: alone 100 (69 never took part), FedAvg devices 31")
    assert devices_lines(rows[2:], 100) == []


def row(name: str, **given: Any) -> ComparisonRow:
    return replace(ComparisonRow(name, 0.5, 0.5, 0.0, 0.0), **given)


# --- a report


@pytest.mark.long
@pytest.mark.parametrize("score", ["sampled", "devices"])
def test_devices_without_a_part_are_told_from_the_others(score: Any, tmp_path: Path) -> None:
    """Of six devices two train. Only they count, in the controls too, unless the score asks for all devices."""
    wanted: dict[str, Any] = {"devices_per_round": 1, "min_devices": 1, "train_limit": 120, "test_limit": 20}
    wanted |= {"devices": 6, "rounds": 2, "models": ("digits_linear",), "seed": 1}
    report = simulate(Simulation(method="fedavg", score=score, out=tmp_path, **wanted))
    alone, devices, whole = report.comparison
    counts = (6, 4) if score == "devices" else (2, 0)
    assert (alone.devices, alone.untrained) == counts
    assert (devices.devices, devices.untrained) == counts
    assert (whole.devices, whole.untrained) == (counts[0], 0)
    counted = [device for device in report.devices if device.took_part or score == "devices"]
    assert len(counted) == counts[0]
    for name in ("alone", "fleet", "trained"):
        for own in ("", "own_"):
            mean = np.mean([getattr(device, f"{own}accuracy_{name}") for device in counted])
            assert getattr(report, f"mean_{own}accuracy_{name}") == pytest.approx(mean), name
    assert alone.accuracy == pytest.approx(report.mean_accuracy_alone)
    for row in report.comparison:
        assert row.fairness is not None
        assert sum(row.fairness.bins) == row.devices
    told = {
        "devices": "train alone, 4 of which never took part and have their initial models",
        "sampled": "the 2 devices that took part are on average",
    }
    assert told[score] in summary_line(report)
    assert ("the models of all devices" in scored_line(report)) == (score == "devices")
    by_round = {"devices": [(6, 5), (6, 4)], "sampled": [(1, 0), (2, 0)]}
    assert [tuple(of.values()) for of in report.counted_by_round] == by_round[score]
    assert ("device takes part (5 of 6 after round 1, 5 in the last 20)" in scored_line(report)) == (score == "devices")


def test_steps_and_exchanges_of_a_real_run(tmp_path: Path) -> None:
    """FedDKD with J = 2: 1 + 2 exchanges a round; 60 rows in batches of 8 are 8 steps an epoch, of 40 rows 5."""
    settings = {"dkd_steps": 2, "local_epochs": 2, "batch_size": 8}
    shared: dict[str, Any] = {"devices": 2, "rounds": 2, "test_limit": 20, "train_limit": 100, "out": tmp_path}
    report = simulate(Simulation(method="feddkd", settings=settings, with_alone=False, with_fedavg=False, **shared))
    rows = [device.samples for device in report.devices]
    a_round = 2 * sum(-(-count // 8) for count in rows) / 2
    for curve in report.curves:
        assert [item.exchanges for item in curve.spent] == [3, 6]
        assert [item.steps for item in curve.spent] == [a_round, 2 * a_round]
    last = report.curves[0].spent[-1]
    for direction in ("up", "down"):
        for part in ("tensor_bytes", "envelope_bytes"):
            total = sum(item[part] for item in report.traffic if item["direction"] == direction)
            assert getattr(last, f"{part}_{direction}") == total
    assert report.summaries["c_spec"].final == report.figures_by_round[-1]["c_spec"]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_trainings_of_an_answer_count(workers: int, tmp_path: Path) -> None:
    """FedRep trains the head for two epochs and then the base for one, each with its own optimiser."""
    settings = {"local_epochs": 3, "base_epochs": 1, "batch_size": 100}
    shared: dict[str, Any] = {"devices": 2, "rounds": 2, "test_limit": 20, "train_limit": 100, "out": tmp_path}
    shared |= {"with_alone": False, "with_fedavg": False, "workers": workers, "score": "none"}
    (curve,) = simulate(Simulation(method="fedrep", settings=settings, **shared)).curves
    assert [item.steps for item in curve.spent] == [3, 6]


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


@pytest.mark.long
def test_the_fleet_expects_what_its_devices_do_by_rows(exchanged: FleetReport) -> None:
    assert exchanged.leave_one_out is not None
    for answer, rate in exchanged.leave_one_out.items():
        told = [(device.leave_one_out or {})[answer] for device in exchanged.devices]
        assert rate == pytest.approx(np.average(told, weights=[device.samples for device in exchanged.devices]))
    (line,) = expected_lines(exchanged)
    assert f"general model {exchanged.leave_one_out['general']:.1%}" in line
    assert all(device.own_statistics_kept in (True, False) for device in exchanged.devices)


@pytest.mark.long
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
