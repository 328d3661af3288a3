"""Settings of a simulation's rounds: how many devices take part, and how many of them must answer."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from support.fleets import SMALL, prepare, run_in_memory
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.folder import saved_simulation
from fleetdistill_lab.simulation.options import merge_settings, read_settings
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.cli.app import app

FLEET = replace(SMALL, method="fedavg", devices=5, rounds=3, train_limit=150, models=("digits_linear",))


def test_each_round_draws_its_devices_from_the_seed(tmp_path: Path) -> None:
    cohorts = []
    for name in ("first", "again"):
        store = run_in_memory(prepare(replace(FLEET, devices_per_round=2), tmp_path / name))
        cohorts.append([row.cohort for row in store.runs.rounds(RUN)])
        assert len(store.devices.all(RUN)) == 5
        store.close()
    assert [len(devices) for devices in cohorts[0]] == [2, 2, 2]
    assert len({tuple(devices) for devices in cohorts[0]}) > 1
    assert cohorts[0] == cohorts[1]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("devices_per_round", -1, "devices_per_round is -1, must be 0 for all devices, or at most devices (5)"),
        ("devices_per_round", 6, "devices_per_round is 6"),
        ("quorum", 0.0, "quorum is 0.0, must be above 0 and at most 1"),
        ("quorum", 1.5, "quorum is 1.5"),
        ("quorum", float("nan"), "quorum is nan"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_settings(replace(FLEET, **{name: value}))
    assert expected in str(refused.value)


def test_simulate_has_few_options_and_sets_everything() -> None:
    """Every field of `Simulation` and of the fleet can be set on the command line, under its own name."""
    simulate = typer.main.get_group(app).get_command(None, "simulate")  # type: ignore[arg-type]
    assert simulate is not None
    assert sum(param.param_type_name == "option" for param in simulate.params) <= 26
    given = dict.fromkeys(("models", "modules", "predictors"), '["a"]') | dict.fromkeys(("data_dir", "out"), "a")
    of_sections = ("settings", "partition_settings", "behaviour")
    defaults = {field.name: field.default for field in fields(Simulation) if field.name not in of_sections}
    for name, default in defaults.items():
        text = given.get(name) or json.dumps(1 if default is None else default)
        value = read_settings(None, [f"simulation.{name}={text}"])["simulation"][name]
        assert replace(Simulation(), **{name: value}) is not None
    for name in (field.name for field in fields(FleetBehaviour) if field.name != "traces"):
        text = json.dumps(getattr(FleetBehaviour(), name))
        assert read_settings(None, [f"fleet.{name}={text}"])["fleet"] == {name: getattr(FleetBehaviour(), name)}


def test_settings_of_the_partition_have_a_section(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[partition]\nmin_size = 3\nbalance = false\n")
    wanted = merge_settings(
        replace(FLEET, rounds=1, out=tmp_path / "out"), read_settings(file, ["partition.min_size=5"])
    )
    assert wanted.partition_settings == {"min_size": 5, "balance": False}
    report = simulate(wanted)
    assert min(device.samples for device in report.devices) >= 5
    saved = json.loads((tmp_path / "out" / "report.json").read_text())["partition_parameters"]
    assert (saved["min_size"], saved["balance"], saved["max_tries"]) == (5, False, 1000)
    resumed = saved_simulation(tmp_path / "out")
    assert resumed.partition_settings == wanted.partition_settings
    with pytest.raises(ConfigurationError, match="partition_settings was"):
        simulate(replace(wanted, partition_settings={}), if_there="resume")


def test_the_command_line_sets_the_rounds_and_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Simulation] = []
    monkeypatch.setattr(show, "simulate_and_show", lambda one, **options: wanted.append(one))
    given = ["--devices", "10000", "--set", "simulation.devices_per_round=200", "--set", "simulation.quorum=0.8"]
    models = ["--set", "simulation.extractor=resnet_extractor", "--set", "simulation.server_model=resnet20"]
    done = CliRunner().invoke(app, ["simulate", *given, *models])
    assert done.exit_code == 0, done.output
    (one,) = wanted
    assert (one.devices, one.devices_per_round, one.quorum) == (10_000, 200, 0.8)
    assert (one.extractor, one.server_model) == ("resnet_extractor", "resnet20")
