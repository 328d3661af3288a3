"""What the commands that lead runs print on a machine without a server."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.intake.operator_log import local_user
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

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


def test_creating_a_run_again_tells_what_has_changed(folder: Path) -> None:
    runs("create", "run.toml")
    assert runs("create", "run.toml").stdout == "run 'digits' is created\n"
    runs("start", "digits")
    (folder / "run.toml").write_text(RUN.replace("rounds = 3", "rounds = 5\nmin_devices = 4"))
    said = runs("create", "run.toml").stdout
    assert said == (
        "run 'digits' has new settings (run.min_devices was 2, is 4; run.rounds was 3, is 5), and is started. Its "
        "engine reads them at its next start: `fleetdistill runs pause digits`, then `fleetdistill runs start digits`\n"
    )
    store = Store.open(folder / "fleetdistill-store")
    store.runs.set_status("digits", RunStatus.FINISHED, "5 rounds completed")
    store.close()
    (folder / "run.toml").write_text(RUN.replace("rounds = 3", "rounds = 7\nmin_devices = 4"))
    assert runs("create", "run.toml").stdout == (
        "run 'digits' has new settings (run.rounds was 5, is 7), and is stopped: finished, and now has 7 rounds\n"
    )


def test_each_change_of_settings_is_an_event_of_the_run(folder: Path) -> None:
    runs("create", "run.toml")
    (folder / "run.toml").write_text(f"{RUN}[server]\nkeep_rounds = 7\n")
    for _ in range(2):
        runs("create", "run.toml")
    events = json.loads(runs("show", "digits", "--json").stdout)["events"]
    assert [event["text"] for event in events if event["kind"] == "settings-changed"] == [
        "server.keep_rounds was 1, is 7; an engine of the run reads its settings when it starts"
    ]


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
    assert runs("start", "digits").stderr == warning
    assert runs("create", "run.toml", "--store", "mine", "--start").stderr == warning.replace(
        "fleetdistill-store", "mine"
    )


def test_a_run_that_the_stores_server_does_not_serve_is_named(folder: Path) -> None:
    warning = (
        "warning: the server serves only run 'other', so run 'digits' waits for another server; "
        "`fleetdistill serve server.toml` serves all runs of the store\n"
    )
    runs("create", "run.toml")
    with serve_lock.take(folder / "fleetdistill-store", "other"):
        assert runs("create", "run.toml", "--start").stderr == warning
        assert runs("start", "digits").stderr == warning
    with serve_lock.take(folder / "fleetdistill-store", "digits"):
        assert runs("start", "digits").stderr == ""


FURTHER = """
[server]
listen = "127.0.0.1:9"
keep_checkpoints = 9
engine_timeout_seconds = 10.0
[engine]
checkpoint_seconds = 5.0
[evaluation]
every = 4
[limits]
devices = 5
"""


def test_settings_that_are_printed_are_all_of_a_run(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN + FURTHER)
    said = runs("create", "run.toml")
    assert said.stderr == (
        "warning: [server] listen and [limits] of the file have no effect on a run of a server of many runs; they "
        "belong in its server.toml\n"
    )
    printed = runs("settings", "digits").stdout
    values = tomllib.loads(printed)
    assert (values["server"]["keep_checkpoints"], values["engine"]["checkpoint_seconds"]) == (9, 5.0)
    assert values["evaluation"]["every"] == 4
    assert "listen" not in values["server"]
    (folder / "printed.toml").write_text(printed)
    assert runs("create", "printed.toml").stdout == "run 'digits' is created\n"
    (folder / "run.toml").write_text((RUN + FURTHER).replace("127.0.0.1:9", "127.0.0.1:8"))
    assert runs("create", "run.toml").stdout == "run 'digits' is created\n", "the address is not one of the run"


def test_a_run_that_has_to_wait_for_an_engine_says_so(folder: Path) -> None:
    runs("create", "run.toml")
    runs("clone", "digits", "digits-2")
    waits = "it is queued (1 of 1): all engines are at work (1, by [server] engines_at_once)\n"
    with serve_lock.take(folder / "fleetdistill-store", "", 1):
        assert runs("start", "digits").stdout == "run 'digits' is started\n"
        assert runs("start", "digits-2").stdout == f"run 'digits-2' is started\n{waits}"
        assert runs("clone", "digits", "digits-2", "--start").stdout.endswith(waits)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[server]\n", "wrong.toml has no section [run], so it is the file of a server; give that of a run"),
        (RUN.replace("rounds = 3", "rounds = -1"), "wrong.toml: [run] rounds is -1, must be at least 0"),
        (RUN.replace('"digits_linear"', '"digits_linnear"'), "wrong.toml: [model] device: "),
    ],
)
def test_a_file_that_cannot_become_a_run_is_named(folder: Path, content: str, says: str) -> None:
    (folder / "wrong.toml").write_text(content)
    done = CliRunner().invoke(app, ["runs", "create", "wrong.toml"])
    assert (done.exit_code, done.stderr.startswith(f"error: {says}")) == (1, True), done.output


def test_a_runs_settings_are_printed_as_its_run_toml(folder: Path) -> None:
    runs("create", "run.toml")
    (folder / "printed.toml").write_text(runs("settings", "digits").stdout)
    assert load_run_config(folder / "printed.toml") == load_run_config(folder / "run.toml")
    assert runs("create", "printed.toml").stdout == "run 'digits' is created\n"
    done = CliRunner().invoke(app, ["runs", "settings", "words"])
    assert done.exit_code == 1
    assert "there is no run 'words'" in done.output


def test_clone_of_existing_run_with_other_settings_is_refused(folder: Path) -> None:
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
