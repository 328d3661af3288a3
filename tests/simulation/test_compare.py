"""benchmarks/experiments/compare.py: which results it takes, and its figures at equal rounds and at equal bytes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdistill.methods import METHODS, config_class
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation

EXPERIMENTS = Path(__file__).parents[2] / "benchmarks" / "experiments"
COMPARISON, KEY = "dafkd-digits", ("alpha 0.1", "dafkd", 10)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("compare")


@pytest.fixture
def tables(compare: Any) -> Any:
    return importlib.import_module("compare_tables")


def row(**changes: Any) -> dict[str, Any]:
    """What is kept of a run of two rounds that costs 10 bytes in the first and 30 in the second."""
    curves = {"fleet_curve": [0.2, 0.4], "own_curve": [0.6, 0.8], "c_per_curve": [0.5, 0.7]}
    rest = {"global_curve": [0.3, 0.5], "fleet_own": 0.8, "alone": None, "alone_own": None, "guards": 0, "rounds": 2}
    return {**curves, **rest, "bytes_up": 15.0, "bytes_down": 5.0, "bytes_curve": [10.0, 40.0], **changes}


def without(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A row of before."""
    return {name: value for name, value in given.items() if name not in names}


# --- which results are taken


def results(compare: Any, folder: Path, *rows: dict[str, Any], words: tuple[str, ...] = ()) -> Any:
    """What is known of a file with these rows of one run."""
    file = folder / "results.jsonl"
    named = dict(zip(("setting", "run", "seed"), KEY, strict=True))
    file.write_text("".join(json.dumps({"comparison": COMPARISON, **named, **row}) + "\n" for row in rows))
    return compare.read_results(compare.arguments([COMPARISON, "--results", str(file), *words]))


def digest_of_today(compare: Any) -> str:
    return str(compare.digest(compare.simulation_of(compare.arguments([COMPARISON]), KEY)))


@pytest.mark.parametrize(
    ("option", "known"), [("--runs", "'no correlation'"), ("--settings", "'alpha 0.1', 'alpha 0.5'")]
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    option: str, known: str, compare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.arguments([COMPARISON, option, "nonsense"])
    assert ended.value.code == 2
    assert f"{option}: dafkd-digits has no 'nonsense'" in (said := capsys.readouterr().err)
    assert known in said


def test_only_rows_of_todays_settings_are_taken(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    today = {"digest": digest_of_today(compare), "fleet": 1}
    known = results(compare, tmp_path, today, {"digest": "of before", "fleet": 2}, {"fleet": 3})
    assert {key: one["fleet"] for key, one in known.items()} == {KEY: 1}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("2 of 3 rows of ")
    assert "1 of all have no digest" in line


def test_run_no_longer_in_comparison_is_not_taken(compare: Any, tmp_path: Path) -> None:
    assert results(compare, tmp_path, {"digest": digest_of_today(compare), "run": "of before"}) == {}


def test_any_settings_takes_them_all(compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = results(compare, tmp_path, {"digest": "of before"}, {"fleet": 3}, words=("--any-settings",))
    assert known[KEY]["fleet"] == 3
    assert capsys.readouterr().out == ""


def test_every_run_of_a_comparison_has_a_digest_of_its_own(compare: Any) -> None:
    for name in compare.COMPARISONS:
        given = compare.arguments([name])
        every = list(compare.keys(given))
        assert len({compare.digest(compare.simulation_of(given, key)) for key in every}) == len(every)


def test_every_run_scores_its_devices_after_each_round(compare: Any) -> None:
    for name in compare.COMPARISONS:
        given = compare.arguments([name])
        for wanted in (compare.simulation_of(given, key) for key in compare.keys(given)):
            assert wanted.scores_devices
            assert wanted.rounds_between_scores == 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"out": Path("elsewhere")}, True),
        ({"data_dir": Path("elsewhere")}, True),
        ({"torch_device": "cpu"}, True),
        ({"link": "grpc"}, True),
        ({"settings": {"local_epochs": 2}}, True),  # the default, spelled out
        ({"settings": {"local_epochs": 3}}, False),
        ({"rounds": 29}, False),
        ({"models": ("digits_linear",)}, False),
        ({"with_alone": False}, False),
        ({"alpha": 0.4}, False),
        ({"seed": 1}, False),
    ],
)
def test_a_digest_is_of_what_decides_the_result(compare: Any, changes: dict[str, Any], same: bool) -> None:
    base = Simulation(method="fedavg")
    assert (compare.digest(base) == compare.digest(replace(base, **changes))) == same


def test_a_default_that_changes_is_another_setting(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Simulation(method=method, settings=dict(config_class(method).examples)) for method in METHODS]
    before = [compare.digest(item) for item in wanted]
    monkeypatch.setattr(compare, "asdict", lambda one: {**vars(one), "batch_size": 999})
    assert all(compare.digest(one) != digest for one, digest in zip(wanted, before, strict=True))


@pytest.mark.long
def test_what_a_run_leaves_is_taken_by_the_next_one(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real small run: its row fits, so nothing is run again; with another setting it is."""
    base = Simulation(method="feddkc", devices=2, train_limit=60, test_limit=20, rounds=2, models=("digits_linear",))
    tiny = compare.Comparison(base, "c_per", {"fedavg": {"method": "fedavg", "settings": {"local_epochs": 1}}})
    monkeypatch.setitem(compare.COMPARISONS, COMPARISON, tiny)
    reports: list[Any] = []

    def watched(wanted: Simulation, **how: Any) -> Any:
        reports.append(simulate(wanted, **how))
        return reports[-1]

    monkeypatch.setattr(compare, "simulate", watched)
    words = [COMPARISON, "--seeds", "3", "--out", str(tmp_path / "work"), "--results", str(tmp_path / "results.jsonl")]
    for _ in range(2):
        compare.main(words)
    (report,) = reports
    (kept,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert kept["c_per_curve"] == [figures["c_per"] for figures in report.figures_by_round]
    assert kept["alone_c_per"] == report.scores["alone"]["accuracy"]["c_per"]
    total = sum(device.bytes_up + device.bytes_down for device in report.devices) / len(report.devices)
    assert kept["bytes_curve"][-1] == pytest.approx(total)
    assert kept["bytes_curve"][0] < kept["bytes_curve"][1]
    changed = replace(tiny, base=replace(base, alpha=0.7))
    monkeypatch.setitem(compare.COMPARISONS, COMPARISON, changed)
    compare.main(words)
    assert len(reports) == 2


# --- figures


def test_c_per_is_the_reports(tables: Any) -> None:
    assert tables.figure_at(row(), "c_per", 2) == 0.7
    assert tables.figure_alone(row(alone=0.2, alone_own=0.9, alone_c_per=0.6), "c_per") == 0.6


def test_older_rows_have_the_c_per_of_before_and_are_said_to(tables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = without(row(), "c_per_curve", "bytes_curve")
    assert tables.figure_at(old, "c_per", 2) == pytest.approx((0.4 + 0.8) / 2)
    assert tables.figure_alone(row(alone=0.2, alone_own=0.9), "c_per") == pytest.approx(0.55)
    tables.print_tables("t", {("x", 0): old, ("x", 1): row()}, ["x"], "c_per")
    said = capsys.readouterr().out
    assert "C-Per of 1 of 2 runs, which are older, is (devices on all classes + own classes) / 2" in said
    assert "kB of 1 of 2 runs, which are older, is the run's mean times the rounds" in said
    tables.print_tables("t", {("x", 1): row()}, ["x"], "c_per")
    assert "older" not in capsys.readouterr().out


def test_bytes_are_those_of_the_rounds_that_were(tables: Any) -> None:
    """40 bytes are four rounds of the other one, although its mean is 20 a round and its last round the dearest."""
    other = row(rounds=6, bytes_curve=[10.0, 20.0, 30.0, 40.0, 50.0, 120.0])
    assert tables.bytes_curve(row()) == [10.0, 40.0]
    assert tables.rounds_at_equal_bytes(row(), other) == (2, 4)
    assert tables.rounds_at_equal_bytes(other, row()) == (4, 2)
    older = without(row(), "bytes_curve"), without(other, "bytes_curve")
    assert tables.bytes_curve(older[0]) == [20.0, 40.0]
    assert tables.rounds_at_equal_bytes(*older) == (2, 2)


def test_every_pair_has_a_budget_of_its_own(tables: Any) -> None:
    """The second seed's first round is dearer; one pair's rounds do not serve for the other."""
    cheap = [10.0, 20.0, 30.0, 40.0]
    curves = {"global_curve": [0.1, 0.2, 0.3, 0.4], "rounds": 4}
    pairs = [
        (row(), row(**curves, bytes_curve=cheap)),
        (row(bytes_curve=[15.0, 20.0]), row(**curves, bytes_curve=cheap)),
    ]
    assert tables.equal_bytes(pairs, "global").endswith("(+10.0, +30.0), rounds 2 and 4/2")


def test_run_without_a_round_in_budget_is_said_to_have_none(tables: Any) -> None:
    dear = row(bytes_curve=[100.0, 200.0])
    assert tables.equal_bytes([(row(), dear)], "global") == "b has not had a round"


def test_bytes_to_fedavgs_accuracy(tables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """0.4 is reached in the second round, after 40 bytes of FedAvg's 400; its global model's 0.5 is not."""
    mine = row(further={"personal": {"accuracy": 0.25, "own_accuracy": 0.75}})
    control = row(fleet_curve=[0.1, 0.4], bytes_curve=[200.0, 400.0])
    result = {("ours", 0): mine, ("means only", 0): mine, ("fedavg, x", 0): control}
    tables.print_tables("t", result, ["ours", "means only", "fedavg, x"], "devices")
    said = capsys.readouterr().out.splitlines()
    assert "| ours to fedavg, x | 0.100 | never |" in said
    assert "| ours, its personal answer | | 25.0 ± 0.0 (25.0) | 75.0 ± 0.0 (75.0) | | | |" in said
