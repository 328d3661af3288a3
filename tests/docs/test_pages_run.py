"""Tutorials and how-tos run as they stand: their files are written, their commands and their Python are run, in order.

Changed are ports and host names, and simulations are made tiny. A page that starts a server is slow.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.forked import ForkedProgram
from support.outside import fresh_process
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until
from torchvision import models
from typer.testing import CliRunner

from fleetdistill_lab.experiments.definition import find_experiment, read_experiment
from fleetdistill_server.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for kind in ("tutorials", "how-to")
    for path in (ROOT / "docs" / kind).glob("*.md")
]
PAGES.append("docs/operations.md")
PRIVATE_TINY = "--set simulation.test_limit=60"
"""Of a private simulation, whose noise needs more rows."""
TINY = f"--rounds 1 --set simulation.control_rounds=1 --set simulation.train_limit=150 {PRIVATE_TINY}"
SMALLER = {'seeds = "0-4"': "seeds = [0]", "rounds = 20": "rounds = 1", "alpha = [0.1, 1.0]\n": "alpha = [1.0]\n"}
"""Of the experiment in docs/how-to/run-experiments.md."""
SHELL_ONLY = (". .venv", "pip install", "make ")
"""Lines that set up an environment: this one is set up already. Targets of make are looked up."""
NEEDS = {
    "docs/how-to/back-up.md": ("docs/how-to/serve-a-run.md", "## Change or cancel the run"),
    "docs/how-to/dashboard.md": ("docs/how-to/serve-a-run.md", "Look at it in the browser"),
}
"""Pages about a store that another page makes, and the heading before which that one ends."""


@dataclass
class Block:
    """A code block of a page; one with a title is a file."""

    language: str
    title: str | None
    text: str


def blocks(page: str, until: str = "\0") -> list[Block]:
    """The code blocks of a page in order."""
    text = (ROOT / page).read_text(encoding="utf-8").split(until)[0]
    result = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    return [Block(language, title or None, text) for language, title, text in result]


def serves(page: str) -> bool:
    """Whether a page, or the one that it needs, starts a server."""
    lines = [
        line for item in (page, *NEEDS.get(page, ())[:1]) for block in blocks(item) for line in block.text.splitlines()
    ]
    return any(line.startswith("fleetdistill serve") and "--check" not in line for line in lines)


@dataclass
class Reader:
    """Someone who follows a page in an empty folder."""

    folder: Path
    replaced: dict[str, str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def follow(self, found: list[Block]) -> None:
        for block in found:
            text = self.here(block.text)
            if block.title == "fedprox.toml":
                for written, smaller in SMALLER.items():
                    assert written in text, written
                    text = text.replace(written, smaller)
            if "[contract]" in text and "listen" not in text:  # of a run: its default port may be in use
                section = f'[server]\nlisten = "127.0.0.1:{self.replaced["50051"]}"\n'
                text = text.replace("[server]\n", section) if "[server]\n" in text else f"{text}\n{section}"
            if block.title:
                (self.folder / block.title).write_text(text)
            elif block.language == "python":
                exec(compile(text, "page", "exec"), self.names)
            elif block.language == "sh":
                self.shell(text)
            else:
                assert block.language in ("", "toml", "json", "text"), block.language

    def here(self, text: str) -> str:
        for written, mine in self.replaced.items():
            text = text.replace(written, mine)
        return text

    def shell(self, text: str) -> None:
        """Runs the lines of a block; scripts run side by side, as in terminals of their own."""
        scripts: list[ForkedProgram] = []
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if line.startswith("python "):
                script = ForkedProgram(words[1:], self.folder / f"script-{len(scripts)}.log", self.folder)
                script.start()
                scripts.append(script)
            elif words[:2] == ["fleetdistill", "serve"] and "--check" not in words:
                self.serve(words, "is served on")
            elif words[:2] == ["fleetdistill", "dashboard"]:
                self.serve([*words, "--port", "0"], "the dashboard is at")
            elif words[:2] == ["fleetdistill", "simulate"] and "--open" in words:
                self.serve([*words, *TINY.split()], "press Ctrl-C to stop")
            elif words[:1] == ["fleetdistill"]:
                self.command(words[1:])
            elif words:
                assert line.startswith(SHELL_ONLY), line
                if words[0] == "make":
                    assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), line
        for script in scripts:
            assert script.ended() == 0, script.said

    def command(self, words: list[str]) -> None:
        """A command in this process; an experiment of the package takes minutes, so that only its file is read."""
        if words[:2] == ["experiment", "run"] and not words[2].endswith(".toml"):
            assert read_experiment(find_experiment(words[2]), words[words.index("--scale") + 1]).cells()
            return
        if words[0] == "simulate":
            dataset = words[words.index("--dataset") + 1] if "--dataset" in words else "digits"
            if dataset != "digits" and "FLEETDISTILL_DATA" not in os.environ:
                pytest.skip(f"FLEETDISTILL_DATA does not lead to {dataset}")
            words = [*words, *(PRIVATE_TINY if any("epsilon" in word for word in words) else TINY).split()]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)

    def serve(self, words: list[str], said: str) -> None:
        server = self.start(words[1:])
        self.servers.append(server)
        wait_until(lambda: server.poll() is not None or said in self.output(server), said)
        assert server.poll() is None, self.output(server)

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        paths = [str(self.folder), str(ROOT / "client_sdk"), str(ROOT / "server")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        with log.open("wb") as out:
            started = subprocess.Popen([*COMMAND, *words], cwd=self.folder, env=environment, stdout=out, stderr=out)
        log.rename(self.folder / f"log-{started.pid}")
        return started

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"log-{process.pid}").read_text()

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_SECONDS)


def free_ports(number: int) -> list[str]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [str(item.getsockname()[1]) for item in taken]
    for item in taken:
        item.close()
    return ports


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    ports = free_ports(3)
    replaced = {
        "50051": ports[0],
        "50052": ports[1],
        "9464": ports[2],
        "fleet.example.org": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
    }
    one = Reader(tmp_path, replaced)
    (tmp_path / "examples").mkdir()
    for example in (ROOT / "examples").glob("*.*"):
        (tmp_path / "examples" / example.name).write_text(one.here(example.read_text()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        with fresh_process():
            yield one
    finally:
        one.close()
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


SIMULATES = [
    f"docs/how-to/{name}.md"
    for name in (
        "audit-a-run",
        "choose-a-method",
        "keep-rows-private",
        "read-a-report",
        "sum-securely",
        "use-a-pretrained-network",
    )
]
"""Pages that simulate for long; docs/tutorials/first-fleet.md does so in little time."""
DRAWS = ("docs/how-to/run-experiments.md", "docs/tutorials/send-own-tensors.md")


def marks(page: str) -> list[pytest.MarkDecorator]:
    of_page = (
        (pytest.mark.slow, serves(page)),
        (pytest.mark.long, page in SIMULATES),
        (pytest.mark.pictures, page in DRAWS),
    )
    return [mark for mark, applies in of_page if applies]


@pytest.mark.long
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in PAGES])
def test_a_page_runs_as_it_stands(page: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    build = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, weights=None: build(name))  # downloads nothing
    if page in NEEDS:
        reader.follow(blocks(*NEEDS[page]))
        reader.close()
        reader.servers.clear()
    result = blocks(page)
    assert result
    reader.follow(result)


@pytest.mark.slow
def test_the_readmes_device_takes_part_in_a_run(reader: Reader) -> None:
    described, served = blocks("docs/how-to/device-without-pytorch.md")[:2]  # a run of one device
    (embedded,) = (block for block in blocks("README.md") if block.language == "python")
    reader.follow([described, served, embedded])
    assert (reader.folder / "my-device/model.onnx").is_file()
