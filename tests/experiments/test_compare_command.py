"""`fleetdistill compare` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.experiments.sweep import read_seeds, simulations
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app

SMALL = ["devices=2", "rounds=1", "train_limit=60", "test_limit=30"]


def call(out: Path, *words: str) -> Any:
    small = [word for text in SMALL for word in ("--set", f"simulation.{text}")]
    return CliRunner().invoke(app, ["compare", "--out", str(out), *small, *words])


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", [0]), ("0-2", [0, 1, 2]), ("4,1", [4, 1]), ("1-2, 7", [1, 2, 7]), ("3-3", [3])]
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "0-2,1", "-1", "1-", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--seeds"):
        read_seeds(text)


def test_settings_are_for_all_or_for_one_method(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "simulation": {"devices": 3},
        "method": {"local_epochs": 4},
        "fedprox": {"mu": 0.5},
    }
    wanted = simulations(["fedavg", "fedprox", "classstats"], [7, 8], sections, tmp_path)
    assert [(one.method, one.seed) for one in wanted[:4]] == [
        ("fedavg", 7),
        ("fedprox", 7),
        ("classstats", 7),
        ("fedavg", 8),
    ]
    assert {one.devices for one in wanted} == {3}
    assert [dict(one.settings) for one in wanted[:2]] == [{"local_epochs": 4}, {"local_epochs": 4, "mu": 0.5}]
    assert len({one.out for one in wanted}) == 6


def test_comparison_runs_once_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call repeats nothing, and a method or a seed more adds its runs only."""
    ran = list[tuple[str, int]]()

    def noting(wanted: Simulation, **how: Any) -> Any:
        ran.append((wanted.method, wanted.seed))
        return simulate(wanted, **how)

    monkeypatch.setattr("fleetdistill_lab.experiments.sweep.simulate", noting)
    assert call(tmp_path, "--method", "fedavg", "--seeds", "0-1").exit_code == 0
    assert ran == [("fedavg", 0), ("fedavg", 1)]
    more = call(tmp_path, "--method", "no_transfer", "--method", "fedavg", "--seeds", "0-2", "--json")
    assert ran[2:] == [("no_transfer", 0), ("no_transfer", 1), ("no_transfer", 2), ("fedavg", 2)]
    said = json.loads(more.stdout)
    assert (said["seeds"], said["controls_missing"]) == ([0, 1, 2], [])
    models = {model["name"]: model for model in said["models"]}
    assert {"no_transfer", "FedAvg devices", "FedAvg global"} <= models.keys()
    assert models["no_transfer"]["exchanges"] == 0
    assert models["no_transfer"]["difference"] is None
    assert {"compare.csv", "compare.png"} <= {file.name for file in tmp_path.iterdir()}
    assert call(tmp_path, "--method", "fedavg", "--seeds", "0", "--overwrite").exit_code == 0
    assert ran[6:] == [("fedavg", 0)]


def test_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fleetdistill_lab.experiments.sweep.simulate", interrupted)
    stopped = call(tmp_path, "--method", "fedavg", "--seeds", "0")
    assert (stopped.exit_code, "the same command continues" in stopped.stderr) == (130, True)
    monkeypatch.setattr("fleetdistill_lab.experiments.sweep.simulate", simulate)
    assert call(tmp_path, "--method", "fedavg", "--seeds", "0").exit_code == 0


def test_missing_controls_are_said(tmp_path: Path) -> None:
    said = call(tmp_path, "--method", "fedprox", "--seeds", "0").stdout
    assert "A control is missing: training alone; add --method no_transfer." in said
    assert "add --method fedavg" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--method must be given once"),
        (["--method", "fedavg", "--method", "fedavg"], "each name once"),
        (["--method", "gossip"], "unknown method 'gossip'"),
        (["--method", "fedavg", "--set", "fedprox.mu=1"], "unknown section 'fedprox'"),
        (["--method", "fedavg", "--set", "method.mu=1"], "none of fedavg has this setting"),
        (["--method", "fedavg", "--method", "fedprox", "--set", "fedprox.mu=-1"], "mu must be >= 0"),
        (["--method", "fedavg", "--set", "fedavg.nonsense=1"], "nonsense"),
        (["--method", "fedavg", "--set", "simulation.nonsense=1"], "nonsense"),
        (["--method", "fedavg", "--seeds", "x"], "--seeds is 'x'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    said = call(tmp_path / "out", *words)
    assert said.exit_code == 1
    assert sentence in said.stderr
    assert said.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    assert call(tmp_path, "--method", "fedavg", "--seeds", "0").exit_code == 0
    said = call(tmp_path, "--method", "fedavg", "--seeds", "0", "--set", "simulation.devices=3")
    assert said.exit_code == 1
    assert "devices was 2, is 3" in said.stderr
    assert "--overwrite" in said.stderr
