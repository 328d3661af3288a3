"""`fleetdistill compare` as a user calls it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.outside import EXAMPLES, fresh_process
from typer.testing import CliRunner

from fleetdistill_server.cli.app import app

SMALL = ["devices=2", "rounds=1", "train_limit=60", "test_limit=30"]


def call(out: Path, *words: str) -> Any:
    small = [word for text in SMALL for word in ("--set", f"simulation.{text}")]
    return CliRunner().invoke(app, ["compare", "--out", str(out), *small, *words])


@pytest.mark.long
def test_comparison_runs_once_and_grows(tmp_path: Path) -> None:
    """The second call repeats nothing, and a method or a seed more adds its runs only."""
    first = call(tmp_path, "--method", "fedavg", "--seeds", "0-1")
    assert first.exit_code == 0, first.output
    assert _runs(first.stderr) == ["1 of 2: fedavg, seed 0", "2 of 2: fedavg, seed 1"]
    more = call(tmp_path, "--method", "no_transfer", "--method", "fedavg", "--seeds", "0-2", "--json", "--workers", "2")
    assert more.exit_code == 0, more.output
    assert len(_runs(more.stderr)) == 4
    said = json.loads(more.stdout)
    assert (said["seeds"], said["controls_missing"]) == ([0, 1, 2], ["tune"])
    models = {model["name"]: model for model in said["models"]}
    assert {"no_transfer", "fedavg devices", "fedavg global"} <= models.keys()
    assert models["no_transfer"]["exchanges"] == 0
    assert models["no_transfer"]["difference"] is None
    assert {"compare.csv", "compare.png", "results.sqlite", "parquet", "runs"} <= {
        file.name for file in tmp_path.iterdir()
    }
    again = call(tmp_path, "--method", "fedavg", "--seeds", "0", "--overwrite")
    assert _runs(again.stderr) == ["1 of 1: fedavg, seed 0"]


def _runs(said: str) -> list[str]:
    return [line.rpartition(":")[0] for line in said.splitlines() if " of " in line and "seed" in line]


def test_method_has_a_second_entry_under_a_label(tmp_path: Path) -> None:
    own = ["--set", "twice.momentum=0.5", "--set", "twice.simulation.rounds=2"]
    said = call(tmp_path, "--method", "fedavg", "--method", "twice=fedavg", *own, "--seeds", "0", "--json")
    assert said.exit_code == 0, said.output
    exchanges = {model["name"]: model["exchanges"] for model in json.loads(said.stdout)["models"]}
    assert (exchanges["fedavg global"], exchanges["twice global"]) == (1, 2)


@pytest.mark.long
def test_missing_controls_are_said(tmp_path: Path) -> None:
    said = call(tmp_path, "--method", "fedprox", "--seeds", "0").stdout
    assert "A control is missing: training alone; add --method no_transfer." in said
    assert "add --method fedavg" in said


def test_comparison_repeats_what_to_know_below_the_table(tmp_path: Path) -> None:
    """Networks, differing defaults and the power of its seeds."""
    said = call(tmp_path, "--method", "no_transfer", "--method", "feddkc", "--seeds", "0")
    assert said.exit_code == 0, said.output
    shown = " ".join(said.stdout.split())
    assert "seeds 0; networks digits_linear, digits_mlp_small" in shown
    assert "Only 1 seed: no difference can be told from chance." in shown
    assert "Defaults differ between methods: learning_rate is 0.02 with no_transfer, 0.01 with feddkc" in shown
    with (tmp_path / "compare.csv").open() as file:
        found = {(row["networks"], row["partition"]) for row in csv.DictReader(file)}
    assert found == {("digits_linear,digits_mlp_small", "dirichlet_by_class")}


@pytest.mark.long
def test_comparison_says_its_partition_and_devices(tmp_path: Path) -> None:
    few = ("devices=3", "devices_per_round=1", "min_devices=1")
    words = [word for text in few for word in ("--set", f"simulation.{text}")]
    said = " ".join(call(tmp_path, "--method", "feddkc", "--seeds", "0", *words).stdout.split())
    assert "digits, 3 devices, dirichlet_by_class, alpha 0.5, 1 round, seeds 0" in said
    assert "Means are over the devices that were scored, of 3: feddkc 1" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--method must be given once"),
        (["--method", "fedavg", "--method", "fedavg"], "each name once"),
        (["--method", "gossip"], "unknown method 'gossip'"),
        (["--method", "fedavg", "--set", "fedprox.mu=1"], "unknown section 'fedprox'"),
        (
            ["--method", "fedavg", "--set", "method.mu=1"],
            "none of fedavg has this setting: unknown setting 'mu', expected",
        ),
        (["--method", "fedavg", "--method", "fedprox", "--set", "fedprox.mu=-1"], "mu must be >= 0"),
        (["--method", "fedavg", "--set", "fedavg.nonsense=1"], "nonsense"),
        (["--method", "fedavg", "--set", "simulation.nonsense=1"], "nonsense"),
        (["--method", "fedavg", "--seeds", "x"], "seeds is 'x'"),
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


@pytest.mark.parametrize("how", ["--import", "file"])
def test_methods_of_own_modules_are_compared(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their settings are checked, so that they are known."""
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "own.toml").write_text('[simulation]\nmodules = ["own_method"]\n')
    words = ["--import", "own_method"] if how == "--import" else [str(tmp_path / "own.toml")]
    with fresh_process("own_method"):
        said = call(tmp_path / "out", *words, "--method", "proximal", "--set", "proximal.mu=-1")
        unknown = call(tmp_path / "out", "--import", "no_such_module", "--method", "proximal")
    assert "mu must be >= 0" in said.stderr
    assert "no_such_module" in unknown.stderr


def test_relative_paths_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", inputs=np.zeros((100, 1, 8, 8), np.float32), labels=np.arange(100) % 2)
    Path("phones.csv").write_text("device,start,end\na,0,1e6\n")
    paths = ("simulation.dataset=own.npz", "fleet.traces=phones.csv", "simulation.data_dir=.")
    words = [word for text in paths for word in ("--set", text)]
    assert call(Path("out"), "--method", "no_transfer", "--seeds", "0", *words).exit_code == 0


def test_comparison_counts_clients_without_a_device(tmp_path: Path) -> None:
    """Two devices for three clients of 40 rows."""
    rows, labels = np.zeros((120, 1, 8, 8), np.float32), np.arange(120) % 2
    tests, clients = {"test_inputs": rows[:20], "test_labels": labels[:20]}, np.repeat([1, 2, 5], 40)
    np.savez(tmp_path / "own.npz", train_inputs=rows, train_labels=labels, train_clients=clients, **tests)  # type: ignore[arg-type]
    settings = (f"dataset={tmp_path}/own.npz", "partition=by_client", "train_limit=120")
    words = [word for text in settings for word in ("--set", f"simulation.{text}")]
    said = call(tmp_path / "out", "--method", "no_transfer", "--seeds", "0-1", *words)
    assert said.exit_code == 0, said.output
    assert said.stdout.count("1 of 3 clients with 40 rows have no device; leave out devices") == 1


@pytest.mark.long
def test_other_settings_are_other_runs(tmp_path: Path) -> None:
    assert call(tmp_path, "--method", "fedavg", "--seeds", "0").exit_code == 0
    said = call(tmp_path, "--method", "fedavg", "--seeds", "0", "--set", "simulation.devices=3", "--json")
    assert json.loads(said.stdout)["devices"] == 3
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a comparison whose runs fail at once, since the data set is missing; nothing checks it before."""
    monkeypatch.setattr("fleetdistill_lab.experiments.runner.check_cells", lambda *_: None)
    (tmp_path / "data").mkdir()
    return ["--seeds", "0", "--data-dir", str(tmp_path / "data"), "--set", "simulation.dataset=femnist-digits"]


def test_differing_defaults_are_said_once(tmp_path: Path, failing: list[str]) -> None:
    said = call(tmp_path / "out", "--method", "feddkc", "--method", "no_transfer", *failing)
    assert said.stderr.count("Devices' networks differ") == 0, "both have the default networks in turn"
    assert said.stderr.count("Defaults differ between methods: learning_rate is 0.01 with feddkc, 0.02 with") == 1


def test_differing_networks_are_said_once(tmp_path: Path, failing: list[str]) -> None:
    said = call(tmp_path / "out", "--method", "fedavg", "--method", "no_transfer", *failing)
    assert said.stderr.count("Devices' networks differ between methods: fedavg: only the largest of the default") == 1
    assert """--set 'simulation.models=["resnet12"]'""" in said.stderr


def test_failed_run_is_an_error(tmp_path: Path, failing: list[str]) -> None:
    said = call(tmp_path / "out", "--method", "fedavg", *failing)
    assert said.exit_code == 1
    controls = (
        "A control is missing: training alone; add --method no_transfer.\n"
        "A control is missing: a learning rate that is tuned for each method; an experiment's file has it with "
        "[tune].\n"
    )
    assert said.stderr.startswith(f"{controls}1 run; a line follows when one ends\n")
    assert "error: 1 run failed; the same command tries again. First: fedavg, seed 0: femnist-digits" in said.stderr
    assert said.stderr.endswith("errors.log)\n")


BROKEN = """
from fleetdistill import methods
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_server import methods as server_methods
from fleetdistill_server.methods.fedavg import FedAvgServer


class BrokenServer(FedAvgServer):
    summary = "fails"

    def update(self, cohort, received):
        raise ValueError("broken on purpose")


methods.register("broken", FedAvgConfig, FedAvgDevice)
server_methods.register("broken", BrokenServer)
"""


@pytest.mark.slow
def test_what_has_run_is_shown_if_a_method_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    methods = ["--import", "broken", "--method", "broken", "--method", "no_transfer"]
    with fresh_process("broken"):
        said = call(tmp_path / "out", *methods, "--seeds", "0")
    assert said.exit_code == 1
    assert "ValueError: broken on purpose" in said.stderr
    assert "no_transfer" in said.stdout


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("dataset=femnist-digits", "femnist-digits: "),
        (
            'models=["resnet99"]',
            "device model 'resnet99' with inputs of shape [1, 8, 8]: unknown device model 'resnet99'",
        ),
        (
            "devices=50",
            "cannot give every device 10 or more rows: 50 devices need 500 rows, there are 60; use fewer devices",
        ),
    ],
)
def test_what_every_run_would_refuse_is_an_error_before(setting: str, sentence: str, tmp_path: Path) -> None:
    """Not one failed run after the other; the methods' defaults are not compared either."""
    (tmp_path / "data").mkdir()
    words = ("--method", "fedavg", "--data-dir", str(tmp_path / "data"), "--set", f"simulation.{setting}")
    said = call(tmp_path / "out", *words)
    assert said.exit_code == 1
    assert said.stderr.startswith(f"error: nothing was run: fedavg, seed 0: {sentence}"), said.stderr
    assert not (tmp_path / "out").exists()
