"""Without an optional package, what needs it names its extra, and everything else works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.answering import AnsweringFleet
from support.live_front import live_front
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until
from support.uninstalled import without

from fleetdistill.version import VERSION
from fleetdistill_lab.conformance import RUN_TOML as RUN_TOML_OF_CONFORMANCE
from fleetdistill_server.store.store import Store

OPTIONAL = ("opentelemetry", "mlflow", "tensorboard", "nicegui", "prometheus_client", "psycopg", "s3fs")
RUN_TOML = """
[run]
name = "digits"
method = "feddkc"
rounds = 1
[contract]
classes = 10
input_shape = [1, 8, 8]
[method]
server_epochs = 1
[server]
listen = "127.0.0.1:0"
store = "store"
torch_device = "cpu"
"""
SETTINGS = {  # value, extra, command
    "traces": ('"otlp"', "otel", ["serve", "run.toml"]),
    "metrics": ('"127.0.0.1:9464"', "server", ["serve", "run.toml", "--check"]),
    "database": ('"postgresql://127.0.0.1/fleet"', "postgres", ["doctor", "run.toml"]),
    "blobs": ('"s3://fleet/store"', "s3", ["serve", "run.toml"]),
}
COMMANDS = {
    "track-mlflow": (["serve", "run.toml", "--track", "mlflow:http://127.0.0.1:5000"], "mlflow"),
    "track-tensorboard": (["serve", "run.toml", "--track", "tensorboard:events"], "tensorboard"),
    "track-of-a-simulation": (["simulate", "--track", "tensorboard:events"], "tensorboard"),
    "dashboard": (["dashboard"], "dashboard"),
    "open": (["simulate", "--open"], "dashboard"),
}

pytestmark = [pytest.mark.slow, pytest.mark.cold_start]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without(tmp_path_factory.mktemp("hidden"), *OPTIONAL)


RUN_EACH = """
import json, os, sys
from fleetdistill_server import start
import torch
from fleetdistill_server.cli import app
for folder, words in json.load(sys.stdin):
    if not os.fork():
        os.chdir(folder)
        file = os.open(f"{folder}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv[1:] = words
        start.main()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Runs each command in a process of its own, which has imported the command line already."""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, str]:
    """What each command of the tables says, in one line; all of them fail and store nothing."""
    work = tmp_path_factory.mktemp("refused")
    given = {setting: (f"{setting} = {value}\n", words) for setting, (value, _, words) in SETTINGS.items()}
    given |= {name: ("", words) for name, (words, _) in COMMANDS.items()}
    for name, (setting, _) in given.items():
        (work / name).mkdir()
        (work / name / "run.toml").write_text(RUN_TOML + setting)
    commands = json.dumps([(str(work / name), words) for name, (_, words) in given.items()])
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], input=commands, env=environment, capture_output=True, text=True
    )
    texts = {name: (work / f"{name}.log").read_text() for name in given}
    assert done.stdout.split() == ["1"] * len(given), (done.stderr, texts)
    for name, text in texts.items():
        assert "Traceback" not in text
        assert [path.name for path in (work / name).iterdir()] == ["run.toml"], "nothing was stored"
    return {name: " ".join(text.split()) for name, text in texts.items()}


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_names_the_extra_that_it_needs(refused: dict[str, str], setting: str) -> None:
    _, extra, _ = SETTINGS[setting]
    needs = rf"\[server\] {setting} needs [\w-]+, which is not installed: pip install 'fleetdistill\[{extra}\]'"
    assert re.search(needs, refused[setting]), refused[setting]


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_extra_that_it_needs(refused: dict[str, str], name: str) -> None:
    assert f"which is not installed: pip install 'fleetdistill[{COMMANDS[name][1]}]'" in refused[name]


# --- a device's environment, with the extra `light` only

SERVER = (
    "click",
    "cryptography",
    "matplotlib",
    "onnx",
    "pydantic",
    "rich",
    "sklearn",
    "sqlite_utils",
    "torch",
    "typer",
)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without(tmp_path_factory.mktemp("light"), *SERVER)


def ran(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_shows_what_a_device_has(tmp_path: Path, light: dict[str, str], words: list[str]) -> None:
    status, text = ran(words, tmp_path, light)
    assert status == 0
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == ["device", "doctor", "health", "conformance"]
    assert "pip install 'fleetdistill[server]'" in text


@pytest.mark.parametrize(
    ("command", "extra"),
    [("serve", "server"), ("runs", "server"), ("simulate", "sim"), ("audit", "sim"), ("dashboard", "dashboard")],
)
def test_a_servers_command_says_which_extra_it_needs(
    tmp_path: Path, light: dict[str, str], command: str, extra: str
) -> None:
    status, text = ran([command], tmp_path, light)
    assert status == 1
    needs = (
        rf"^error: `fleetdistill {command}` needs \w+, which is not installed: pip install 'fleetdistill\[{extra}\]'"
        "\\nCommands that work without it: device, doctor, health, conformance$"
    )
    assert re.match(needs, text.strip()), text


@pytest.mark.long
def test_a_simulation_without_its_extra_says_so(tmp_path: Path) -> None:
    """With the extra `server`, where the command line is complete."""
    (tmp_path / "hidden").mkdir()
    status, text = ran(["simulate"], tmp_path, without(tmp_path / "hidden", "matplotlib"))
    assert status == 1
    needs = "error: `fleetdistill simulate` needs matplotlib, which is not installed: pip install 'fleetdistill[sim]'"
    assert needs in text


@pytest.mark.long
def test_a_devices_commands_run_without_a_server(tmp_path: Path, light: dict[str, str]) -> None:
    assert ran(["--version"], tmp_path, light) == (0, f"{VERSION}\n")
    assert ran(["conformance", "--run-toml"], tmp_path, light) == (0, RUN_TOML_OF_CONFORMANCE)
    status, text = ran(["device", "inspect", "nowhere"], tmp_path, light)
    assert (status, text.split(":")[0]) == (1, "error")
    status, text = ran(["doctor", "--state", "nowhere"], tmp_path, light)
    assert status == 1
    assert "nowhere" in text
    Store.open(tmp_path / "store").close()
    with live_front(tmp_path / "store") as front:
        address = f"127.0.0.1:{front.port}"
        part = ["--service", "fleetdistill.database"]  # a front alone has no engine
        assert ran(["health", address, *part], tmp_path, light) == (0, f"{address} serves\n")
    status, text = ran(["health", "127.0.0.1:1"], tmp_path, light)
    assert status == 1
    assert text.startswith("error: ")


def test_a_device_names_the_extra_of_its_tracer_provider(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "from fleetdistill import Device, Runtime\nfrom fleetdistill.errors import ConfigurationError\n"
        "runtime = Runtime(tracer_provider=object())\n"
        "try:\n    Device(server='127.0.0.1:1', worker=print, state_dir='state', runtime=runtime)\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.stdout == (
        "tracer_provider needs opentelemetry-api, which is not installed: pip install 'fleetdistill[otel]'\n"
    ), said.stderr


@pytest.mark.long
def test_a_run_is_served_without_any_of_them(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    log, command = tmp_path / "log", [*COMMAND, "serve", "run.toml", "--until-finished"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[0])
        with AnsweringFleet(port, "digits", 2) as fleet:
            wait_until(lambda: all(device.finished for device in fleet.devices), "the devices to hear of the end")
            process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()
    for asked in (["runs", "show", "digits", "--store", "store"], ["doctor", "run.toml"]):
        done = subprocess.run([*COMMAND, *asked], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
