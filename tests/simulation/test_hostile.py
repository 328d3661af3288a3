"""Hostile devices among honest ones, end to end: the run completes, and who did it is named."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import HOSTILE as HOSTILE_FLEET
from support.fleets import RUN, outcome, prepare, run_in_memory
from support.long import long_except

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.links import links
from fleetdistill_lab.simulation.spec.hostile import ATTACKS
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.event_kinds import LEFT_OUT
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

FLEET = replace(HOSTILE_FLEET, attack="")
HOSTILE = "device-0"
AVERAGING: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "feddkd": {"method": "feddkd", "settings": {"dkd_steps": 2}},
    "dafkd": {"method": "dafkd", "settings": {"kd_samples": 64, "local_epochs": 1}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "fedd2s": {"method": "fedd2s", "models": ("fedd2s_digits",)},  # Adam bounds what its rows do to a copy
    "feddkc": {"method": "feddkc"},
    "cdkt": {"method": "cdkt"},
}


def run(tmp_path: Path, name: str, attack: str, **settings: Any) -> Store:
    given = {**AVERAGING, **OTHERS}[name]
    wanted = replace(FLEET, **{**given, "settings": {**given.get("settings", {}), **settings}}, attack=attack)
    return run_in_memory(prepare(wanted, tmp_path / "work"))


def named(store: Store) -> set[str]:
    return {row.device for kind in LEFT_OUT for row in store.history.events(RUN, kind)}


@pytest.mark.parametrize("attack", ["scaled", "reversed"])
@pytest.mark.parametrize("name", long_except(AVERAGING, "fedavg"))
def test_bad_data_of_one_device_ends_no_run_and_device_is_named(name: str, attack: str, tmp_path: Path) -> None:
    store = run(tmp_path, name, attack)
    outcome(store)
    assert HOSTILE in named(store)
    assert all(row.status == "closed" for row in store.runs.rounds(RUN))
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_methods_that_average_no_models_of_devices_complete_too(name: str, tmp_path: Path) -> None:
    store = run(tmp_path, name, "scaled")
    outcome(store)
    assert named(store) == ({HOSTILE} if name == "feddkc" else set())
    store.close()


@pytest.mark.parametrize("name", long_except([*AVERAGING, *OTHERS], "fedavg", "feddkc"))
def test_a_device_that_declares_far_too_many_samples_is_named(name: str, tmp_path: Path) -> None:
    store = run(tmp_path, name, "declares")
    outcome(store)
    assert [row.device for row in store.history.events(RUN, "large-device")] == [HOSTILE]
    store.close()


def test_with_robust_off_one_device_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack is one: without the bounds nothing finite comes of the rounds."""
    monkeypatch.setattr(links, "MAX_SHORT_ROUNDS", 2)
    with pytest.raises(RunError, match="2 rounds in a row fell short"):
        run(tmp_path, "fedavg", "scaled", robust="off")


def test_who_is_left_out_three_rounds_running_is_a_suspect(tmp_path: Path) -> None:
    wanted = replace(FLEET, method="fedavg", attack="scaled", rounds=4)
    store = run_in_memory(prepare(wanted, tmp_path / "work"))
    rounds = views.run(store, RUN).lists["rounds"]
    assert [row["suspects"] for row in rounds] == ["", "", HOSTILE, HOSTILE]
    assert store.credentials.revocations() == []
    store.close()


def test_honest_devices_alone_are_not_named(tmp_path: Path) -> None:
    store = run_in_memory(prepare(replace(FLEET, method="fedavg", hostile=0), tmp_path / "work"))
    assert named(store) == set()
    assert not any(row["suspects"] for row in views.run(store, RUN).lists["rounds"])
    store.close()


@pytest.mark.long
@pytest.mark.slow
def test_global_model_is_about_as_good_as_without_hostile_device(tmp_path: Path) -> None:
    fleet = replace(FLEET, method="fedavg", train_limit=500, rounds=5, settings={"local_epochs": 4})

    def accuracy(**changes: Any) -> float:
        name = "-".join(map(str, changes.values())) or "honest"
        result = simulate(replace(fleet, **changes, out=tmp_path / name)).global_accuracy_by_round[-1]
        assert result is not None
        return result

    alone = accuracy(hostile=0)
    for attack in ("scaled", "reversed"):
        assert accuracy(attack=attack) > alone - 0.15
    assert accuracy(attack="reversed", settings={"local_epochs": 4, "robust": "off"}) < alone - 0.3


@pytest.mark.parametrize(("hostile", "attack"), [(1, ""), (1, "shouts"), (2, "flips"), (-1, "flips")])
def test_an_attack_that_is_none_is_refused(hostile: int, attack: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"hostile is .* devices and attack is"):
        simulate(Simulation(devices=2, hostile=hostile, attack=attack, out=tmp_path))
    assert set(ATTACKS) == {"flips", "reversed", "scaled", "random", "declares"}


@pytest.mark.long
def test_the_example_shows_the_attack_and_the_defence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "examples/hostile_fleet.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--devices", "5", "--rounds", "3", "--out", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "160")
    runpy.run_path(str(script), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    shown = {
        tuple(cells[:2]): cells[2:] for cells in ([item.strip() for item in line.split("│")[1:-1]] for line in lines)
    }
    assert list(shown) == [("0 hostile", "off"), ("0 hostile", "gross"), ("1 hostile", "off"), ("1 hostile", "gross")]
    last = {row: int(accuracies.split()[-1].rstrip("%")) for row, (accuracies, _) in shown.items()}
    assert last["1 hostile", "gross"] > last["1 hostile", "off"] + 10
    assert last["1 hostile", "gross"] > last["0 hostile", "gross"] - 20
    assert [named for _, named in shown.values()] == ["", "", "", HOSTILE]
