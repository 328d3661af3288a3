"""The gateway in examples/: a service that waits, learns, stops and continues, and its unit file."""

from __future__ import annotations

import configparser
import contextlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forked import ForkedProgram
from support.outside import EXAMPLES
from support.processes import COMMAND, wait_until
from support.secured import make_pki
from support.served import served

from fleetdistill import Predictor

GATEWAY = EXAMPLES / "gateway" / "gateway.py"
UNIT = EXAMPLES.parent / "deploy/systemd/fleetdistill-device.service"
SETTINGS: dict[str, Any] = {
    "run": {"method": "classstats", "rounds": 0, "min_devices": 1},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
}


class Site:
    """A folder of samples, a token, and the socket of a service manager; starts the gateway."""

    def __init__(self, work: Path, address: str, notified: socket.socket) -> None:
        self.work, self.address, self.notified = work, address, notified
        self.programs: list[ForkedProgram] = []
        self.states: list[str] = []
        (work / "samples").mkdir()
        run("enrol", "--store", work / "store", "--pki", work / "pki", "--device", "site-1", "--out", work / "token")

    def start(self) -> ForkedProgram:
        """Starts the gateway; its output goes to a file of its own."""
        words: list[str | Path] = [
            GATEWAY,
            "--server",
            self.address,
            "--device-id",
            "site-1",
            "--enrolment",
            self.work / "token",
        ]
        words += ["--state-dir", self.work / "state", "--data", self.work / "samples"]
        log = self.work / f"gateway-{len(self.programs)}.log"
        program = ForkedProgram(words, log, NOTIFY_SOCKET=self.notified.getsockname())
        self.programs.append(program)
        program.start()
        return program

    def add_samples(self, name: str, inputs: np.ndarray) -> None:
        """Puts a complete file of samples into the folder."""
        np.savez(self.work / "new.npz", inputs=inputs, labels=np.arange(len(inputs)) % 10)
        (self.work / "new.npz").rename(self.work / "samples" / name)

    def wait_for(self, program: ForkedProgram, text: str) -> None:
        """Waits until a program has printed a text, and receives its states meanwhile as a service manager does."""
        wait_until(lambda: text in self.said_by(program) or not program.is_alive, text)
        assert text in program.said, program.said

    def ended(self, program: ForkedProgram) -> int | None:
        """Waits until a program has ended; returns its exit status."""
        wait_until(lambda: self.said_by(program) and not program.is_alive, "the end")
        self.said_by(program)
        return program.ended()

    def said_by(self, program: ForkedProgram) -> str:
        """Receives the states that a program has sent; returns what it has printed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.states += self.notified.recv(4096).decode().splitlines()
        return program.said


def run(*words: str | Path) -> None:
    """Runs a command of the operator."""
    done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    make_pki(tmp_path / "pki")
    server = {"pki": str(tmp_path / "pki"), "enrol_listen": "127.0.0.1:0"}
    with (
        tempfile.TemporaryDirectory() as short,  # a socket's path has at most 107 bytes
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
        served(tmp_path, {**SETTINGS, "server": server}) as address,
    ):
        notified.bind(f"{short}/notify")
        notified.setblocking(False)
        site = Site(tmp_path, address, notified)
        try:
            yield site
        finally:
            for program in site.programs:
                program.kill()


@pytest.mark.long
@pytest.mark.slow
def test_gateway_enrols_learns_files_and_continues_after_sigterm(site: Site) -> None:
    images = np.random.default_rng(0).random((200, 1, 8, 8), np.float32)
    gateway = site.start()
    site.wait_for(gateway, "data has no samples;")
    (site.work / "samples" / "broken.npz").write_bytes(b"not a zip file")
    site.add_samples("monday.npz", images[:100])
    site.wait_for(gateway, "wrote model.onnx")
    gateway.send(signal.SIGTERM)
    assert site.ended(gateway) == 0, gateway.said
    assert "broken.npz is not used" in gateway.said
    assert gateway.said.splitlines()[-1] == "INFO gateway: stopped by SIGTERM"
    assert (site.states[0], site.states[-1]) == ("READY=1", "STOPPING=1")
    assert {"WATCHDOG=1", "STATUS=round 1: delivered"} < set(site.states)

    gateway = site.start()
    site.wait_for(gateway, "takes part")
    site.add_samples("tuesday.npz", images[100:])
    site.wait_for(gateway, "wrote model.onnx")
    assert Predictor(site.work / "state").version > 1
    gateway.send(signal.SIGINT)
    assert site.ended(gateway) == 0, gateway.said
    assert gateway.said.splitlines()[-1] == "INFO gateway: stopped by SIGINT"

    run("devices", "revoke", "site-1", "--store", site.work / "store")
    gateway = site.start()
    assert site.ended(gateway) == 78, gateway.said
    assert "the server refuses this device" in gateway.said


# --- the unit file


def test_unit_is_hardened_and_gateway_accepts_its_command() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    hardened = {"DynamicUser": "yes", "ProtectSystem": "strict", "CapabilityBoundingSet": "", "Type": "notify"}
    assert {name: service[name] for name in hardened} == hardened
    assert {"StateDirectory", "MemoryMax", "WatchdogSec"} <= set(service)
    assert service["RestartPreventExitStatus"] == "78"
    words = shlex.split(service["ExecStart"].replace("\\\n", " "))
    assert Path(words[1]).name == GATEWAY.name
    usage = subprocess.run([sys.executable, GATEWAY, "--help"], capture_output=True, text=True, check=True).stdout
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", usage))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/fleetdistill/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_data_folder_is_an_error(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        GATEWAY,
        "--server",
        "127.0.0.1:1",
        "--state-dir",
        tmp_path / "s",
        "--data",
        tmp_path / "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"--data is {tmp_path / 'x'}, expected a folder\n")


def test_the_gateway_is_short() -> None:
    assert len(GATEWAY.read_text().splitlines()) < 120
