"""The command line: what it prints, what it says about mistakes, and its exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from support.driving import DriveDevices
from typer.testing import CliRunner, Result

from fleetdistill import Step
from fleetdistill.version import VERSION
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.data.partition import partition
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.plan import RUN, make_run_config, make_specs
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.store import Store

DEVICES, ROUNDS = 2, 2
SMALL = (
    *("--method", "feddkc", "--devices", "2", "--rounds", "1"),
    *("--set", "simulation.train_limit=200", "--set", "simulation.test_limit=100"),
)


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def printed(*words: str | Path) -> Any:
    """What a command prints with --json."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def sentence(*words: str | Path) -> str:
    """The one sentence of a command that fails."""
    result = call(*words)
    assert result.exit_code == 1, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in result.output
    return last


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store of a finished run on the disk, and its run.toml."""
    work = tmp_path_factory.mktemp("cli")
    wanted = Simulation(method="feddkc", devices=DEVICES, rounds=ROUNDS, settings={"teacher_guard": False})
    data = load_dataset("digits", train_limit=200)
    split = partition("iid", data.train_labels.numpy(), DEVICES, 0)
    config = make_run_config(wanted, data, work)
    (work / "run.toml").write_text(as_toml(config))
    store = Store.open(Path(config.server.store))
    api = DeviceApi(store)
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(make_device(s, MemoryLink(api))) for s in make_specs(wanted, data, split, work)]
        asyncio.run(Engine(store, config, DriveDevices(devices, lambda: None)).run())
        for device in devices:
            while device.step(0.0) is not Step.FINISHED:
                pass
    store.close()
    return work


@pytest.mark.parametrize(
    "command",
    ["", "serve", "simulate", "methods", "runs", "runs list", "runs show", "devices", "export"],
)
def test_every_command_explains_itself(command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    if command not in ("", "runs"):
        assert "Example" in result.stdout


def every_command(group: Any, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """All commands and groups below one, by the words that call them."""
    result = {words: group}
    for name, one in getattr(group, "commands", {}).items():
        result |= every_command(one, (*words, name))
    return result


@pytest.mark.parametrize(("words", "command"), every_command(typer.main.get_command(app)).items())
def test_help_shows_every_word_that_was_written(words: tuple[str, ...], command: Any) -> None:
    """Words in brackets, such as [server], look like markup."""

    def packed(text: str) -> str:
        return "".join(text.split())

    shown = packed(call(*words, "--help").stdout)
    assert packed(command.help) in shown
    for parameter in command.params:
        assert packed(getattr(parameter, "help", None) or "") in shown


FOR_SERVERS = {
    words: command
    for words, command in every_command(typer.main.get_command(app)).items()
    if {"server", "identity"} <= {param.name for param in command.params if param.param_type_name == "option"}
}
"""Commands that use a store on this machine, or a server from elsewhere."""


def words_for(parameter: Any) -> list[str]:
    """The words that a parameter needs, with some value."""
    value = "viewer" if parameter.name == "role" else "1"
    given = [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return given if parameter.required else []


@pytest.mark.parametrize("words", FOR_SERVERS)
def test_an_identity_without_a_server_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    needed = [word for param in FOR_SERVERS[words].params for word in words_for(param)]
    said = sentence(*words, *needed, "--identity", tmp_path)
    assert "error: --identity needs --server; add --server host:port, or remove --identity" in said


def test_version_is_that_of_the_distribution() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, VERSION)


def test_wrong_usage_ends_with_2() -> None:
    assert call("runs", "show").exit_code == 2
    assert call("simulate", "--rounds", "many").exit_code == 2
    assert call("fly").exit_code == 2


# --- looking at a store


def test_runs_list_says_what_each_run_is(work: Path) -> None:
    (row,) = printed("runs", "list", "--store", work / "store")
    assert row["run"] == RUN
    assert (row["method"], row["status"], row["devices"]) == ("feddkc", "finished", DEVICES)
    assert RUN in call("runs", "list", "--store", work / "store").stdout


def test_runs_show_has_rounds_bytes_and_events(work: Path) -> None:
    shown = printed("runs", "show", RUN, "--store", work / "store")
    assert [row["round"] for row in shown["rounds"]] == [1, 2]
    for row in shown["rounds"]:
        assert (row["status"], row["cohort"], row["used"], row["reported"]) == ("closed", DEVICES, DEVICES, 0)
        assert 0 <= row["test_accuracy"] <= 1
        assert 0 <= row["teacher_accuracy"] <= 1
    assert [row["device"] for row in shown["bytes"]] == ["device-0", "device-1"]
    # 100 rows of 128 features and 10 logits in float16, a label and an id; down come logits and ids from round 2 on
    upload, download = 100 * (2 * 128 + 2 * 10 + 4 + 8), 100 * (2 * 10 + 8)
    for row in shown["bytes"]:
        assert row["up"] >= ROUNDS * upload
        assert row["down"] >= (ROUNDS - 1) * download
        assert row["up"] + row["down"] - row["envelope_bytes"] - ROUNDS * upload - (ROUNDS - 1) * download < 2_000
    assert shown["events"] == []
    table = call("runs", "show", RUN, "--store", work / "store").stdout
    assert "rounds (2)" in table
    assert "events (0)" in table


def test_runs_show_says_what_was_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("bad", {"run": {"name": "bad", "method": "feddkc", "rounds": 3}})
    store.history.add_event("bad", "refused", "label 12 outside [0, 10)", number=4, device="device-1", code="bad-value")
    store.close()
    (event,) = printed("runs", "show", "bad", "--store", tmp_path)["events"]
    assert (event["kind"], event["code"], event["round"]) == ("refused", "bad-value", 4)
    assert (event["device"], event["text"]) == ("device-1", "label 12 outside [0, 10)")
    assert "label 12" in call("runs", "show", "bad", "--store", tmp_path).stdout


def test_devices_lists_who_checked_in(work: Path) -> None:
    rows = printed("devices", "--store", work / "store")
    assert [row["device"] for row in rows] == ["device-0", "device-1"]
    assert [row["model"] for row in rows] == ["digits_linear", "digits_mlp_small"]
    assert [row["samples"] for row in rows] == [100, 100]
    assert not any(row["present"] for row in rows)  # they said goodbye
    assert rows == printed("devices", "--run", RUN, "--store", work / "store")
    assert call("devices", "--store", work / "store").exit_code == 0


def test_devices_tells_who_is_revoked(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("r", {})
    for device in ("kept", "stolen"):
        store.devices.register("r", device, b"", b"")
    revoke_device(store, "stolen", "")
    store.close()
    rows = printed("devices", "--store", tmp_path)
    assert {row["device"]: row["revoked"] for row in rows} == {"kept": False, "stolen": True}


def test_an_unknown_run_is_one_sentence(work: Path) -> None:
    assert "'other'" in sentence("runs", "show", "other", "--store", work / "store")
    assert "'other'" in sentence("devices", "--run", "other", "--store", work / "store")
    assert "'other'" in sentence("export", "other", "--store", work / "store", "--out", work / "other.onnx")
    assert not (work / "other.onnx").exists()


def test_a_missing_store_is_one_sentence_and_is_not_made(tmp_path: Path) -> None:
    for words in (("runs", "list"), ("runs", "show", "x"), ("devices",), ("export", "x")):
        assert "--store" in sentence(*words, "--store", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_export_writes_a_model_for_any_batch(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(work)
    result = call("export", RUN, "--store", "store")
    assert result.exit_code == 0, result.stderr
    assert f"{RUN}-server.onnx" in result.stdout
    session = onnxruntime.InferenceSession(str(work / f"{RUN}-server.onnx"))
    for batch in (1, 7):
        features = np.random.default_rng(0).random((batch, 8, 4, 4), dtype=np.float32)
        assert session.run(["logits"], {"input": features})[0].shape == (batch, 10)
    assert session.get_modelmeta().custom_metadata_map["run"] == RUN


def test_export_of_a_run_without_a_round_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("young", {"run": {"name": "young"}})
    store.close()
    assert "not completed a round" in sentence("export", "young", "--store", tmp_path, "--out", tmp_path / "young.onnx")


def test_export_of_run_with_pruned_payloads_says_what_to_do(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "store", tmp_path / "store")
    assert call("runs", "prune", RUN, "--keep-rounds", "0", "--yes", "--store", tmp_path / "store").exit_code == 0
    said = sentence("export", RUN, "--store", tmp_path / "store", "--out", tmp_path / "x.onnx")
    assert "or they were pruned; if they were, export from a backup that still has them" in said


# --- serve


def test_serve_refuses_a_file_that_is_missing_or_wrong(tmp_path: Path) -> None:
    assert "none.toml" in sentence("serve", tmp_path / "none.toml")
    wrong = tmp_path / "run.toml"
    wrong.write_text('[run]\nname = "x"\nroundz = 1\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n')
    said = sentence("serve", wrong)
    assert "[run] roundz" in said
    assert "rounds" in said


@pytest.mark.long
def test_serve_refuses_a_run_that_changed(work: Path, tmp_path: Path) -> None:
    changed = tmp_path / "run.toml"
    changed.write_text((work / "run.toml").read_text().replace("seed = 0", "seed = 3"))
    assert "run.seed was 0, is 3" in sentence("serve", changed)


# --- simulate

REPORT_KEYS = {
    *("method", "link", "seed", "rounds", "seconds", "mean_accuracy_alone", "mean_accuracy_fleet"),
    *("acknowledged_uploads", "used_uploads", "refused_uploads", "devices"),
}
DEVICE_KEYS = {
    *("name", "model", "parameters", "samples", "accuracy_alone", "accuracy_fleet"),
    *("bytes_up", "bytes_down", "onnx_file", "onnx_max_difference"),
}


@pytest.mark.pictures
def test_simulate_prints_the_report_that_it_writes(tmp_path: Path) -> None:
    report = printed("simulate", "--link", "memory", *SMALL, "--set", "method.refinement=kkr", "--out", tmp_path)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert report["settings"]["refinement"] == "kkr"
    assert (report["method"], report["link"], report["rounds"], report["seed"]) == ("feddkc", "memory", 1, 0)
    assert (report["acknowledged_uploads"], report["used_uploads"], report["refused_uploads"]) == (2, 2, 0)
    for device in report["devices"]:
        assert device.keys() >= DEVICE_KEYS
        assert device["bytes_up"] > device["samples"] * 128 * 2
        assert (tmp_path / device["onnx_file"]).is_file()
        assert device["onnx_max_difference"] < 1e-4
    assert (tmp_path / "fleet.png").stat().st_size > 10_000, "drawn, as the other tests do without"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("refinement", "--set is 'refinement', expected section.key=value"),
        ("refinement=kkr", "--set is 'refinement=kkr', expected section.key=value"),
        ("method.refinement=best", "'best'"),
        ("method.speed=1", "speed: unknown setting"),
        ("method.beta=-1", "beta must be >= 0"),
        ("method.beta=nan", "beta"),
        ("method.local_epochs=1.5", "local_epochs"),
        ("method.teacher_guard=1", "teacher_guard"),
        ("method.target_peak=0.1", "(1/C, 1) = (0.1, 1)"),
        ("method.epsilon=9", "epsilon=9"),
        ("fleets.churn=1", "--set unknown section 'fleets'; did you mean 'fleet'?"),
        ("simulation.quorm=1", "--set [simulation] unknown setting 'quorm'; did you mean 'quorum'?"),
        ("simulation.settings={}", "--set [simulation] unknown setting 'settings'"),
        ("simulation.rounds=many", "--set [simulation] rounds is 'many': Input should be a valid integer"),
        ("simulation.models=x", """--set [simulation] models is 'x', expected a list, such as ["x"]"""),
        ("simulation.modules=x", """--set [simulation] modules is 'x', expected a list, such as ["x"]"""),
        ("simulation.modules=[5]", "--set [simulation] modules is [5]: Input should be a valid string"),
        ("simulation.quorum=0", "quorum is 0.0, must be above 0"),
        ("partition.min_sise=1", "[partition] unknown setting 'min_sise'; did you mean 'min_size'?"),
        ("partition.min_size=-1", "[partition] min_size is -1, must be at least 0"),
        ("simulation.alpha=0", "alpha is 0.0, must be a finite number > 0"),
        (
            "simulation.alpha=[0.1]",
            "alpha is [0.1]: Input should be a valid number; to try several values, put the list in [grid] of an",
        ),
        ("fleet.churn=often", "--set [fleet] churn is 'often': Input should be a valid number"),
    ],
)
def test_a_bad_setting_is_named(given: str, expected: str, tmp_path: Path) -> None:
    assert expected in sentence("simulate", *SMALL, "--set", given, "--out", tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "simulation.partition=iid", "--alpha", "0.5"], "alpha has no effect with the partition iid; "),
        (
            ["--set", "simulation.classes_per_device=2"],
            "leave it out, or use classes_window or classes_random or class_s",
        ),
    ],
)
def test_settings_of_another_partition_are_refused(words: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in sentence("simulate", *SMALL, *words, "--out", tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--set", 'simulation.predictors=["space_mpl_64"]'),
        ("--method", "fedx"),
        ("--link", "pigeon"),
        ("--dataset", "cats"),
        ("--set", "simulation.partition=odd"),
        ("--model", "huge"),
    ],
)
def test_an_unknown_name_is_a_sentence_with_the_known_ones(option: str, value: str, tmp_path: Path) -> None:
    said = sentence("simulate", *SMALL, option, value, "--out", tmp_path)
    name = value.partition("=")[2].strip('[]"') or value
    assert repr(name) in said or f" {name}" in said
    assert any(word in said for word in ("xpected one of", "must be"))


def test_simulate_leaves_a_folder_alone_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    assert "not created by a simulation" in sentence("simulate", *SMALL, "--out", tmp_path)
    assert (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_predictors_are_dealt_out_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Simulation] = []
    monkeypatch.setattr(show, "simulate_and_show", lambda one, **options: wanted.append(one))
    given = ["--set", 'simulation.predictors=["space_linear", "space_mlp_64"]']
    done = CliRunner().invoke(app, ["simulate", "--method", "classstats", *given])
    assert done.exit_code == 0, done.output
    assert [item.predictors for item in wanted] == [("space_linear", "space_mlp_64")]
