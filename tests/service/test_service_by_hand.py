"""The README's steps: serve a run, start three apps, look at it, export, end everything, start it again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forked import ForkedProgram
from support.processes import COMMAND, PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODELS = ("digits_linear", "digits_mlp_small", "digits_cnn_small")
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
ROUNDS = 12


class Program:
    """A program that runs beside the test, and what it has said so far."""

    def __init__(self, *words: str | Path, cwd: Path) -> None:
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [str(word) for word in words],
            cwd=cwd,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._lines)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        """Exit status, once it has ended by itself."""
        status = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            self._lines.extend(stdout)


def wait_for(program: Program | ForkedProgram, pattern: str) -> re.Match[str]:
    """Waits until a program has said something."""

    def found() -> re.Match[str] | None:
        lives = program.is_alive
        match = re.search(pattern, program.said)
        assert match or lives, program.said
        return match

    match = wait_until(found, repr(pattern))
    assert match is not None
    return match


def interrupt(program: Program | ForkedProgram) -> int | None:
    """Presses Ctrl-C; exit status."""
    program.send(signal.SIGINT)
    return program.ended()


class Hands:
    """Starts programs in one folder, as a person would in several terminals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[Program | ForkedProgram] = []

    def start(self, *words: str | Path) -> Program:
        program = Program(*words, cwd=self.folder)
        self.programs.append(program)
        return program

    def serve(self, config: Path) -> tuple[Program, str]:
        """The server, and where it listens."""
        server = self.start(*COMMAND, "serve", config)
        return server, wait_for(server, r"is served on (127\.0\.0\.1:\d+)")[1]

    def device(self, number: int, server: str) -> ForkedProgram:
        app = ROOT / "examples" / "embed_in_app.py"
        own = ["--state-dir", f"out/device-{number}", "--model", MODELS[number], "--part", f"{number}/3"]
        words: list[str | Path] = [app, "--server", server, *own, "--device-id", f"device-{number}"]
        program = ForkedProgram(words, self.folder / f"device-{len(self.programs)}.log", self.folder)
        program.start()
        self.programs.append(program)
        return program

    def asks(self, *words: str) -> Any:
        """What a command of the operator prints as JSON."""
        return json.loads(self.says(*words, "--json"))

    def says(self, *words: str) -> str:
        done = subprocess.run(
            [*COMMAND, *words], cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    hands = Hands(tmp_path)
    try:
        yield hands
    finally:
        for program in reversed(hands.programs):
            with contextlib.suppress(ProcessLookupError):
                program.kill()


def example_run(folder: Path, rounds: int) -> Path:
    """examples/run.toml on a free port; its store lies in the folder, as the path there is relative."""
    text = (ROOT / "examples" / "run.toml").read_text()
    for old, new in (("127.0.0.1:50051", "127.0.0.1:0"), ("rounds = 10", f"rounds = {rounds}")):
        assert old in text
        text = text.replace(old, new)
    config = folder / "run.toml"
    config.write_text(text)
    return config


@pytest.mark.long
def test_readme_service_runs_continues_after_ctrl_c_and_finishes(hands: Hands) -> None:
    config = example_run(hands.folder, ROUNDS)
    server, address = hands.serve(config)

    # One device alone waits for the others; Ctrl-C ends it, and it may come again under its name.
    early = hands.device(0, address)
    wait_for(early, "checked-in")
    assert interrupt(early) == 0
    assert "stopping after this step" in early.said
    assert hands.asks("runs", "show", "digits")["status"] == "waiting for devices"

    # Ctrl-C in every terminal in the middle of the run.
    devices = [hands.device(number, address) for number in range(3)]
    wait_for(server, f"round closed, 2 of {ROUNDS} completed")
    assert interrupt(server) == 0, "first: with its devices gone, the run would wait for them"
    for device in devices:
        device.send(signal.SIGINT)
    assert [device.ended() for device in devices] == [0, 0, 0], [device.said for device in devices]
    before = hands.asks("runs", "show", "digits")
    assert before["status"] == "running (no server)"
    assert 2 <= sum(row["status"] == "closed" for row in before["rounds"]) < ROUNDS

    # The same commands again: the run goes on to its end.
    server, address = hands.serve(config)
    devices = [hands.device(number, address) for number in range(3)]
    assert [device.ended() for device in devices] == [0, 0, 0], [device.said for device in devices]
    for device in devices:
        assert "delivered" in device.said
        assert f"finished  finished: {ROUNDS} rounds completed" in device.said

    check_what_the_operator_sees(hands, disturbed={row["round"] for row in before["rounds"][2:]})
    for number in range(3):
        assert_any_batch(hands.folder / f"out/device-{number}/model.onnx", (1, 8, 8))
    assert "agrees with PyTorch" in hands.says("export", "digits", "--out", "teacher.onnx")
    assert_any_batch(hands.folder / "teacher.onnx", (8, 4, 4))
    assert interrupt(server) == 0
    assert "stopped; the run has ended" in server.said

    # Once more: the run is over, and whoever comes is told so at once.
    server, address = hands.serve(config)
    again = hands.device(1, address)
    assert again.ended() == 0
    assert "finished" in again.said
    assert "round " not in again.said.split("finished")[0]
    closed = [row for row in hands.asks("runs", "show", "digits")["rounds"] if row["status"] == "closed"]
    assert len(closed) == ROUNDS
    assert interrupt(server) == 0
    assert hands.start(*COMMAND, "serve", config, "--until-finished").ended() == 0


def check_what_the_operator_sees(hands: Hands, disturbed: set[int]) -> None:
    """Only rounds in which devices left may lack answers or have events."""
    (run,) = hands.asks("runs", "list")
    assert (run["run"], run["status"], run["devices"]) == ("digits", "finished", 3)
    assert (run["completed_rounds"], run["wanted_rounds"]) == (ROUNDS, ROUNDS)
    shown = hands.asks("runs", "show", "digits")
    whole = [row for row in shown["rounds"] if row["round"] not in disturbed]
    assert len(whole) > 2
    assert [row["used"] for row in whole] == [3] * len(whole)
    assert [row["status"] for row in whole] == ["closed"] * len(whole)
    assert {event["round"] for event in shown["events"]} <= disturbed
    rows = hands.asks("devices", "--run", "digits")
    assert [(row["device"], row["model"]) for row in rows] == [(f"device-{i}", MODELS[i]) for i in range(3)]
    assert not any(row["present"] for row in rows)
    assert all(row["test_accuracy"] > 0.5 for row in rows)


def assert_any_batch(path: Path, shape: tuple[int, ...]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path))
    for batch in (1, 5):
        logits = session.run(["logits"], {"input": np.zeros((batch, *shape), dtype=np.float32)})[0]
        assert logits.shape == (batch, 10)
        assert np.isfinite(logits).all()
