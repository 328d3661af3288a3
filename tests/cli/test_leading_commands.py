"""What the commands that lead runs print on a machine without a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.local_calls import local_user

RUN = """
[run]
name = "digits"
method = "fedavg"
rounds = 3

[contract]
classes = 10
input_shape = [1, 8, 8]

[model]
device = "digits_linear"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def runs(*words: str) -> Result:
    done = CliRunner().invoke(app, ["runs", *words])
    assert done.exit_code == 0, done.output
    return done


def test_a_new_store_is_named_and_a_known_one_is_not(folder: Path) -> None:
    assert runs("create", "run.toml").stdout == "run 'digits' is created in the new store fleetdistill-store\n"
    assert "new store" not in runs("create", "run.toml").stdout
    assert "in the new store mine" in runs("create", "run.toml", "--store", "mine").stdout


def test_a_run_that_no_server_works_on_is_started_with_a_warning(folder: Path) -> None:
    warning = (
        "warning: no server is running on the store fleetdistill-store; use --store to name your server's store, "
        "or start one with `fleetdistill serve`\n"
    )
    assert runs("create", "run.toml").stderr == ""
    assert runs("start", "digits").stderr == warning
    assert runs("clone", "digits", "digits-2").stderr == ""
    assert runs("clone", "digits", "digits-3", "--start").stderr == warning
    assert runs("pause", "digits").stderr == ""
    assert runs("resume", "digits").stderr == warning
    assert runs("create", "run.toml", "--store", "mine", "--start").stderr == warning.replace(
        "fleetdistill-store", "mine"
    )


def test_a_clone_with_other_settings_of_an_existing_run_is_refused(folder: Path) -> None:
    runs("create", "run.toml")
    assert runs("clone", "digits", "copy").stdout == runs("clone", "digits", "copy").stdout == "run 'copy' is created\n"
    done = CliRunner().invoke(app, ["runs", "clone", "digits", "copy", "--set", "run.rounds=1", "--start"])
    assert done.exit_code == 1
    assert "error: run 'copy' exists with other settings: run.rounds was 3, is 1;" in done.stderr


def test_a_run_without_a_reason_has_no_line_for_it(folder: Path) -> None:
    runs("create", "run.toml")
    shown = runs("show", "digits").stdout
    assert "reason:" not in shown
    assert "created: 20" in shown
    runs("start", "digits")
    runs("pause", "digits")
    shown = runs("show", "digits").stdout
    assert "reason: by the operator" in shown, "devices get the reason, so it names nobody"
    assert re.search(rf"paused +by {re.escape(local_user())} on the store's machine", shown)
