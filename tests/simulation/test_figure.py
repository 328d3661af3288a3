"""The figure of a simulation: its type and panels are settings, which a resumed simulation may change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import SMALL
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.folder import saved_simulation
from fleetdistill_server.cli.app import app

OPTIONS = ["simulate", "--method", "feddkc", "--devices", "2", "--rounds", "2", "--no-controls"]
OPTIONS += ["--set", "simulation.train_limit=60", "--set", "simulation.test_limit=20"]


def figures(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("fleet.*"))


@pytest.mark.long
@pytest.mark.pictures
def test_a_finished_simulation_is_drawn_again_as_another_type(tmp_path: Path) -> None:
    chosen = ["--figure", "svg", "--panels", "rounds", "--panels", "gains", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*OPTIONS, *chosen])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"{tmp_path}/: report.json, fleet.svg, onnx/")
    drawn = (tmp_path / "fleet.svg").read_text()
    assert "Accuracy on all classes by round" in drawn
    assert "Training data by device" not in drawn
    before = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "fleet.toml").touch()

    again = ["simulate", "--resume", "--figure", "pdf", "--panels", "data", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert figures(tmp_path) == ["fleet.pdf", "fleet.toml"]
    assert (tmp_path / "fleet.pdf").read_bytes().startswith(b"%PDF")
    after = json.loads((tmp_path / "report.json").read_text())
    assert {**after, "seconds": 0} == {**before, "seconds": 0}


def test_another_simulation_in_the_folder_leaves_no_old_figure(tmp_path: Path) -> None:
    simulate(replace(SMALL, figure="svg", out=tmp_path))
    assert figures(tmp_path) == ["fleet.svg"]
    simulate(replace(SMALL, out=tmp_path), if_there="overwrite")
    assert figures(tmp_path) == ["fleet.png"]


def test_panels_are_saved_with_the_settings(tmp_path: Path) -> None:
    wanted = replace(SMALL, panels=("traffic", "data"), out=tmp_path)
    simulate(wanted)
    assert saved_simulation(tmp_path).panels == wanted.panels


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [("figure", "jpg", "png, pdf, svg"), ("panels", ("round",), "traffic, rounds, data, gains")],
)
def test_unknown_types_and_panels_are_refused_before_a_run(tmp_path: Path, name: str, value: Any, known: str) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=f"one of {known}"):
        simulate(replace(SMALL, out=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
