"""A long training continues from its resume point after the engine was killed, and shows its progress."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answering import AnsweringDevice
from torch import Tensor

from fleetdistill.state import failpoints
from fleetdistill.state.failpoints import FailpointError
from fleetdistill.testing import ManualClock
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.round_training import FILE, ResumeStorage, TrainingProgress
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.feddkc.server import FedDKCServer
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.resume import ResumePoints

ROWS, EPOCHS = 40, 3


class Killed(Exception):
    """Stands for the death of the engine."""


class Drive:
    """A waker that lets one device after the other take a step."""

    def __init__(self, devices: list[AnsweringDevice]) -> None:
        self._devices = devices
        self._turn = 0

    async def wait(self, seconds: float = 0.0) -> None:
        self._turn += 1
        self._devices[self._turn % len(self._devices)].step()

    def wake_other(self) -> None:
        return


def config_of(**engine: Any) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 2, "min_devices": 2},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": EPOCHS, "batch_size": 8},
            "server": {"torch_device": "cpu"},
            "engine": engine,
        }
    )


class Fleet:
    """Two devices and a store on the disk; every engine saves a resume point after each mini-batch.

    Attributes:
        steps: Optimiser steps of all engines.
        kill_at: The step before which the engine dies; 0 for never.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.store = Store.open(directory)
        link = MemoryLink(DeviceApi(self.store))
        self.drive = Drive([AnsweringDevice(link, RUN, f"d{number}", rows=ROWS // 2) for number in range(2)])
        self.steps = self.kill_at = 0
        plain = FedDKCServer.loss

        def loss(server: FedDKCServer, *given: Any) -> Tensor:
            self.steps += 1
            if self.steps == self.kill_at:
                raise Killed
            return plain(server, *given)

        save = ResumePoints.save

        def save_and_wait(points: ResumePoints, key: str, state: Any) -> None:
            save(points, key, state)
            points.wait()

        monkeypatch.setattr(FedDKCServer, "loss", loss)
        monkeypatch.setattr(ResumePoints, "save", save_and_wait)

    def run(self) -> None:
        asyncio.run(Engine(self.store, config_of(checkpoint_seconds=1e-9), self.drive, directory=self.directory).run())

    def checkpoint(self) -> bytes:
        row = self.store.runs.get(RUN)
        assert row is not None
        assert row.status == "finished"
        return bytes(row.checkpoint)


STEPS = 2 * EPOCHS * ROWS // 8


@pytest.fixture
def expected(tmp_path: Path) -> bytes:
    """The checkpoint of a run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        fleet = Fleet(tmp_path / "undisturbed", patch)
        fleet.run()
        assert fleet.steps == STEPS
        return fleet.checkpoint()


@pytest.mark.parametrize("moment", ["engine.training.before-name", "engine.training.after-name"])
def test_a_killed_training_continues_bit_for_bit(
    moment: str, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies while it writes the resume point of the seventh mini-batch of the first round."""
    fleet = Fleet(tmp_path / "killed", monkeypatch)
    with failpoints.switched_on(f"{moment}=error@7"), suppress(OSError, FailpointError):
        fleet.run()
    repeated = 1 if moment.endswith("before-name") else 0
    assert fleet.steps == 7
    fleet.run()
    assert fleet.steps == STEPS + repeated
    assert fleet.checkpoint() == expected


def test_an_engine_that_dies_between_two_steps_repeats_none(
    expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path / "killed", monkeypatch)
    for at in (3, 9, 20):
        fleet.kill_at = at
        with suppress(Killed):
            fleet.run()
    fleet.kill_at = 0
    fleet.run()
    assert fleet.steps == STEPS + 3  # the three steps that were not taken
    assert fleet.checkpoint() == expected
    assert not (fleet.directory / FILE).exists()


def test_a_resume_point_of_other_inputs_is_not_used(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    storage = ResumeStorage(store.blobs, tmp_path)
    storage.save("key", {"weights": torch.arange(3.0)})
    assert storage.load("another key") is None
    result = storage.load("key")
    assert result is not None
    assert torch.equal(result["weights"], torch.arange(3.0))
    storage.save("key", {"weights": torch.zeros(3)})
    assert len(store.blobs.held()) == 1
    (tmp_path / FILE).write_text("damaged")
    assert storage.load("key") is None
    storage.clear()
    store.close()


def test_resume_points_have_their_distance() -> None:
    clock, saved = ManualClock(), []

    class Memory:
        def save(self, key: str, state: Any) -> None:
            saved.append((key, state))

        def load(self, key: str) -> None:
            return None

        def clear(self) -> None:
            return

    points = ResumePoints(Memory(), 60.0, clock.now)
    key, state = points.begin("training")
    assert state is None
    for seconds in (59.0, 1.0, 59.0, 1.0):
        clock.advance(seconds)
        if points.is_due():
            points.save(key, {"position": len(saved)})
        points.wait()
    assert saved == [(key, {"position": 0}), (key, {"position": 1})]
    points.origin = lambda: ["another round"]
    assert points.begin("training")[0] != key


def test_progress_shows_the_time_left() -> None:
    clock, texts = ManualClock(), list[str]()
    progress = TrainingProgress(texts.append, clock.now)
    for fraction in (0.0, 0.1, 0.2, 0.3):
        progress("training", fraction)
        clock.advance(40.0)
    assert texts == [
        "training, 10 % done, about 6 min left",
        "training, 20 % done, about 5 min left",
        "training, 30 % done, about 5 min left",
    ]
    progress("training", 0.0)  # the next training
    clock.advance(9.0)
    progress("training", 0.9)
    assert len(texts) == 3
    clock.advance(1.0)
    progress("training", 0.95)
    assert texts[3:] == ["training, 95 % done, about 1 s left"]


def test_a_long_training_shows_its_progress_in_the_runs_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fleet = Fleet(tmp_path / "run", monkeypatch)
    set_status = fleet.store.runs.set_status

    def seen_and_stored(run: str, status: RunStatus, reason: str) -> None:
        seen.append(reason)
        set_status(run, status, reason)

    monkeypatch.setattr(fleet.store.runs, "set_status", seen_and_stored)
    monkeypatch.setattr("fleetdistill.progress.INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("fleetdistill_server.engine.round_training.INTERVAL_SECONDS", 0.0)
    fleet.run()
    assert seen[0].startswith("round 1: training, 7 % done, about ")
    assert "" in seen  # cleared at the end of the round
    assert seen[-1] == "2 rounds completed"
