"""Class statistics as a service: a run without an end whose fleet changes, with real devices and the real engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats.class_statistics_fleet import CLASSES, SHAPE, rows_of
from support.open_device import open_device

from fleetdistill import Device
from fleetdistill.device import Step
from fleetdistill.knowledge import GENERAL, OWN, PERSONAL, Array
from fleetdistill.models import build_model
from fleetdistill.state.state_file import unpack_state
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

RUN = "open"
_LOOKS = 6
"""So often in a row the engine finds nothing to do before the fleet changes."""
COUNTS = {"a": [20, 12, 6, 0], "b": [0, 9, 14, 8], "c": [6, 0, 7, 9]}


class Over(Exception):
    """Nothing is left to happen."""


def data_of(counts: list[int], seed: int) -> tuple[Array, Array]:
    rows = rows_of(counts, seed)
    return (rows.inputs / 1.2).numpy(), rows.labels.numpy()


def config() -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "classstats", "rounds": 0, "min_devices": 2},
            "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
            "method": {"rows_per_direction": 2},
            "server": {"torch_device": "cpu"},
        }
    )


class Fleet:
    """The waker of an engine: it lets the devices work, and changes the fleet whenever nothing is left to do."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = Store.in_memory(), folder
        self.api = DeviceApi(self.store)
        self.devices: dict[str, Device] = {}
        self.acts: list[Callable[[], None]] = []
        self.spaces: list[dict[str, Any]] = []
        self._quiet = 0

    def come(self, name: str) -> None:
        self.devices[name] = open_device(
            server=MemoryLink(self.api),
            model=lambda: build_model("digits_linear", classes=CLASSES),
            data=data_of(COUNTS[name], ord(name)),
            state_dir=self.folder / name,
            device_id=name,
            export="never",
        )

    def leave(self, name: str) -> None:
        self.devices.pop(name).close()

    def look(self) -> None:
        """Notes the space that the run has now."""
        row = self.store.runs.get(RUN)
        assert row is not None
        self.spaces.append(unpack_state(self.store.blobs.get_state(row.checkpoint))["space"])

    async def wait(self, seconds: float = 0.0) -> None:
        for device in list(self.devices.values()):
            device.step(0.0)
        self._quiet = 0 if self.store.runs.open_round(RUN) is not None else self._quiet + 1
        if self._quiet == _LOOKS:
            self._quiet = 0
            if not self.acts:
                raise Over
            self.acts.pop(0)()

    def wake_other(self) -> None:
        return

    def play(self, *acts: Callable[[], None]) -> None:
        self.acts = [*acts]
        with contextlib.suppress(Over):
            asyncio.run(Engine(self.store, config(), self).run())

    def asked(self) -> list[list[tuple[str, str]]]:
        """(step, device) of every ask of each round."""
        result = []
        for row in self.store.runs.rounds(RUN):
            steps = [self.store.asks.of_step(RUN, row.number, number) for number in (1, 2)]
            result.append([(ask.step, ask.device) for asks in steps for ask in asks])
        return result

    def close(self) -> None:
        for name in list(self.devices):
            self.leave(name)
        self.store.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    made = Fleet(tmp_path)
    made.come("a")
    made.come("b")
    yield made
    made.close()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def summarise(names: str) -> list[tuple[str, str]]:
    return [("summarise", name) for name in names]


def learn(names: str) -> list[tuple[str, str]]:
    return [("learn", name) for name in names]


def test_joining_leaving_and_forgetting_change_space_exactly(fleet: Fleet) -> None:
    fleet.play(
        fleet.look,
        lambda: fleet.come("c"),
        fleet.look,
        lambda: fleet.leave("c"),
        fleet.look,
        lambda: ask_to_forget(fleet.store, RUN, "c", served=RUN) and None,  # type: ignore[arg-type]
        fleet.look,
    )
    first, with_c, without_its_presence, forgotten = fleet.spaces
    assert not equal(first, with_c)
    assert equal(with_c, without_its_presence)
    assert equal(first, forgotten)
    assert fleet.asked() == [
        summarise("ab") + learn("ab"),
        summarise("c") + learn("abc"),
        learn("ab"),
    ]
    assert fleet.store.runs.existing(RUN).status == "running"


def test_a_forgotten_device_is_told_so_when_it_comes_back(fleet: Fleet) -> None:
    said, store = list[str](), fleet.store

    def forget() -> None:
        store.devices.ask_to_forget(RUN, "a")

    def come_back() -> None:
        fleet.leave("a")
        fleet.come("a")
        fleet.devices["a"]._lock.on_event = lambda event: said.append(f"{event.kind}: {event.text}")

    fleet.come("c")
    fleet.play(forget, come_back, fleet.look)
    assert said[-1].startswith(f"finished: a was removed from run '{RUN}', and its deletion was requested")
    assert fleet.devices["a"].step(0.0) is Step.FINISHED
    assert sorted(fleet.devices["a"].models) == [GENERAL, OWN, PERSONAL]
    rows = {row["device"]: row["forgotten"] for row in views.devices(store, RUN).lists["devices"]}
    assert (str(rows["a"])[:2], rows["b"], rows["c"]) == ("20", None, None)
    assert ask_to_forget(store, RUN, "a", served=True)
    assert len(store.history.events(RUN, "forgotten")) == 1


def test_device_with_new_rows_is_asked_again_all_get_new_space(fleet: Fleet) -> None:
    other = data_of([0, 20, 14, 8], 77)
    fleet.play(fleet.look, lambda: fleet.devices["b"].replace_data(other), fleet.look)
    before, after = fleet.spaces
    assert not equal(before, after)
    assert fleet.asked()[1:] == [summarise("b") + learn("ab")]
    assert after["counts"].tolist() != before["counts"].tolist()


def test_nothing_is_asked_or_written_while_nothing_changes(fleet: Fleet) -> None:
    rounds: list[int] = []
    fleet.play(*[lambda: rounds.append(len(fleet.store.runs.rounds(RUN)))] * 5)
    assert rounds == [1] * 5


def test_a_newcomer_that_comes_alone_is_served(fleet: Fleet) -> None:
    def alone() -> None:
        fleet.leave("a")
        fleet.leave("b")
        fleet.come("c")

    fleet.play(alone, fleet.look)
    assert fleet.asked()[1:] == [summarise("c") + learn("c")]
    images = torch.from_numpy(data_of([0, 8, 0, 0], 5)[0])
    with torch.no_grad():
        result = fleet.devices["c"].models[GENERAL](images).argmax(dim=1)
    assert (result == 1).float().mean() > 0.7  # a class that it has no row of
