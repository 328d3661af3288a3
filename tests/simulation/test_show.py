"""What a simulation prints, and the titles of its picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.report import write_report
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.show import report_table, scored_line, show_comparison, show_run, summary_line
from fleetdistill_lab.simulation.spec.settings import Simulation

FLEET = Simulation(
    method="feddkc",
    devices=2,
    rounds=1,
    train_limit=60,
    test_limit=20,
    torch_device="cpu",
    models=("digits_mlp_large", "digits_linear"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FleetReport:
    return simulate(replace(FLEET, out=tmp_path_factory.mktemp("show") / "out"))


def printed(report: FleetReport, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show_run(report)
    show_comparison(report, Path("out/simulation"))
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]


def test_on_a_terminal_of_80_columns_everything_fits(
    report: FleetReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    lines = printed(report, capsys)
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if "alone -> fleet" in line)
    assert head.split()[:2] == ["device", "model"]
    assert "own classes" in head
    assert "ONNX" not in head
    text = " ".join(" ".join(lines).split())
    assert "uploads acknowledged" in text, "sentences are wrapped, not cut"
    assert f"{report.mean_accuracy_fleet:.1%}" in text


def test_elsewhere_all_columns_and_whole_sentences_are_printed(
    report: FleetReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(report, capsys)
    assert any("params" in line and "ONNX" in line for line in lines)
    assert "Partition of the data: dirichlet_by_class, alpha 0.5, seed 0" in lines
    assert any(re.search(r" s; the fleet is .* uploads acknowledged, \d+ used$", line) for line in lines)


@pytest.mark.parametrize(("fleet", "text"), [(0.525, "2.5 points better"), (0.475, "2.5 points worse")])
def test_a_gain_or_a_loss_is_told_in_points(report: FleetReport, fleet: float, text: str) -> None:
    line = summary_line(replace(report, mean_accuracy_alone=0.5, mean_accuracy_fleet=fleet))
    assert f"; the fleet is on average {text} than devices that train alone; " in line


def test_it_is_told_what_was_scored_when_and_on_how_many_rows(report: FleetReport) -> None:
    """The global model is scored after each round where devices are, too."""
    lines = [
        scored_line(
            replace(
                report,
                global_accuracy_by_round=[0.5],
                scored={"models": models, "every": 3, "rows": rows, "test_rows": 200},
            )
        )
        for models, rows in (("global", 0), ("sampled", 40))
    ]
    of_devices = "the models of a round's devices every 3 rounds and at the end, and of all that took part at the end"
    assert lines == [
        "Scored (--score global): the global model every 3 rounds and at the end, on 200 test rows",
        f"Scored (--score sampled): the global model after each round, on 200 test rows; {of_devices}, "
        "on 40 of the 200 test rows, drawn by class",
    ]


def test_a_large_fleet_has_rows_for_sixty_devices(report: FleetReport) -> None:
    devices = [replace(device, name=f"{number}-{device.name}") for number in range(100) for device in report.devices]
    table = report_table(replace(report, devices=devices))
    assert table.caption == f"60 of {len(devices)} devices; report.json has all of them"
    assert table.row_count == 60 + 1 + len(report.further)


def test_the_last_row_has_all_samples_and_the_mean_bytes(report: FleetReport) -> None:
    one = replace(report.devices[0], samples=1_000, bytes_up=2_000_000, bytes_down=0)
    other = replace(report.devices[1], samples=500, bytes_up=4_000_000, bytes_down=1_000_000)
    table = report_table(replace(report, devices=[one, other]))
    last = {str(column.header): list(column.cells)[2] for column in table.columns}
    assert (last["samples"], last["up"], last["down"]) == ("1,500", "3.00 MB", "500.0 kB")


def test_a_wide_terminal_has_every_column(report: FleetReport) -> None:
    assert len(report_table(report, 200).columns) == len(report_table(report).columns) == 9
    assert [column.header for column in report_table(report, 1).columns] == [
        "device",
        "model",
        "alone -> fleet",
        "own classes",
    ]


def test_picture_of_interrupted_simulation_names_the_round(
    report: FleetReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Mapping[str, Any]] = []
    monkeypatch.setattr(
        "fleetdistill_lab.simulation.report.report.save_report_figure", lambda file, **given: drawn.append(given)
    )
    write_report(report, tmp_path)
    write_report(replace(report, finished=False, rounds=30), tmp_path)
    whole, part = drawn
    assert (whole["title"], whole["by_device"].moment) == ("feddkc on digits, seed 0, over memory", "at the end")
    assert part["title"] == "feddkc on digits, seed 0, over memory: interrupted after 1 of 30 rounds"
    assert part["by_device"].moment == "after round 1"


@pytest.mark.parametrize(("method", "said"), [("fedavg", True), ("feddkc", False)])
def test_the_only_model_used_of_several_is_named(method: str, said: bool, tmp_path: Path) -> None:
    models = ("digits_linear", "digits_mlp_small")
    told: list[str] = []
    few = Simulation(method=method, models=models, devices=2, rounds=1, train_limit=60, test_limit=30, out=tmp_path)
    simulate(replace(few, export="none", with_alone=False, with_fedavg=False), tell=told.append)
    line = (
        "all devices have digits_mlp_small, because fedavg needs one architecture; it is the largest of digits_linear, "
        "digits_mlp_small"
    )
    assert told == [line] * said
