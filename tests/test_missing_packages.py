"""Without an optional package, what needs it names its extra, and everything else works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.answering import AnsweringFleet
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until
from support.uninstalled import without

OPTIONAL = ("opentelemetry", "mlflow", "tensorboard", "nicegui", "prometheus_client", "psycopg", "s3fs")
RUN_TOML = """
[run]
name = "digits"
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


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without(tmp_path_factory.mktemp("hidden"), *OPTIONAL)


def refused(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command that fails says, in one line."""
    done = subprocess.run([*COMMAND, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_names_the_extra_that_it_needs(tmp_path: Path, environment: dict[str, str], setting: str) -> None:
    value, extra, command = SETTINGS[setting]
    (tmp_path / "run.toml").write_text(f"{RUN_TOML}{setting} = {value}\n")
    said = refused(command, tmp_path, environment)
    needs = rf"\[server\] {setting} needs [\w-]+, which is not installed: pip install 'fleetdistill\[{extra}\]'"
    assert re.search(needs, said), said
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"], "nothing was stored"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_extra_that_it_needs(tmp_path: Path, environment: dict[str, str], name: str) -> None:
    command, extra = COMMANDS[name]
    (tmp_path / "run.toml").write_text(RUN_TOML)
    said = refused(command, tmp_path, environment)
    assert f"which is not installed: pip install 'fleetdistill[{extra}]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"], "nothing was stored"


def test_a_device_names_the_extra_of_its_tracer_provider(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "from fleetdistill import Device\nfrom fleetdistill.errors import ConfigurationError\n"
        "try:\n    Device(server='127.0.0.1:1', worker=print, state_dir='state', tracer_provider=object())\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.stdout == (
        "tracer_provider needs opentelemetry-api, which is not installed: pip install 'fleetdistill[otel]'\n"
    ), said.stderr


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
            wait_until(lambda: all(one.finished for one in fleet.devices), "the devices to hear of the end")
            process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()
    for asked in (["runs", "show", "digits", "--store", "store"], ["doctor", "run.toml"]):
        done = subprocess.run([*COMMAND, *asked], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
