"""With validation data the app's model becomes the best of the received model, the trained one and the present one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import compute_of
from support.fleets import RUN, RUNS, prepare
from support.open_device import open_device

from fleetdistill import COLUMNS, Device
from fleetdistill.replacement import judge
from fleetdistill.testing import EventLog
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.testing import MemoryServer


@pytest.mark.parametrize(
    ("trained", "received", "in_use", "drop", "expected"),
    [
        (0.513, 0.637, 0.4, 0.0, (True, 0.637, "received")),
        (0.637, 0.513, 0.4, 0.0, (True, 0.637, "trained")),
        (0.513, 0.637, 0.7, 0.0, (False, 0.637, "received")),  # the present one is best
        (0.5, 0.5, 0.5, 0.0, (True, 0.5, "trained")),  # among equals, the one that goes on
        (0.5, 0.6, 0.6, 0.0, (True, 0.6, "received")),
        (0.5, 0.6, 0.65, 0.1, (True, 0.6, "received")),  # 0.65 - 0.1 is below 0.6
        (0.5, 0.6, 0.75, 0.1, (False, 0.6, "received")),
        (0.5, 0.6, None, 0.0, (True, 0.6, "received")),  # the app has no model yet
        (0.5, None, 0.4, 0.0, (True, 0.5, "trained")),  # nothing was received
        (0.5, 0.0, 0.4, 0.0, (True, 0.5, "trained")),
    ],
)
def test_the_best_of_received_trained_and_present_is_chosen(
    trained: float, received: float | None, in_use: float | None, drop: float, expected: tuple[bool, float, str]
) -> None:
    best, result = judge({"general": trained}, in_use, drop, received)
    assert best == "general"
    assert (result.replaced, result.accuracy, "received" if result.received else "trained") == expected
    assert ("received" in result.text) == (result.replaced and result.received)


# --- in a run

FLEET_MODEL = ("dafkd distilling", "dafkd exact", "fedavg", "feddkd", "feddkd with batch-norm on devices")
"""Runs whose asks have a model for the device; in the others the variants are made from what it receives."""
NO_FLEET_MODEL = ("cdkt", "classstats", "fedd2s", "feddkc")
FIRST_ROUNDS = 2


def accuracy(model: torch.nn.Module, data: tuple[np.ndarray, np.ndarray]) -> float:
    with torch.no_grad():
        return float((model(torch.from_numpy(data[0])).argmax(1).numpy() == data[1]).mean())


class Chosen:
    """A fleet whose first device has validation data that the run's initial model answers without a mistake.

    It receives this model in the first round, and every training makes it worse.
    """

    def __init__(self, name: str, work: Path, rounds: int | None = None) -> None:
        config, self.specs, _ = prepare(RUNS[name], work / "made")
        sections = config.model_dump(by_alias=True, exclude_unset=True)
        self.settings = {key: value for key, value in sections.items() if value is not None}
        if rounds is not None:
            self.settings["run"]["rounds"] = rounds
        self.work, self.events = work, EventLog()
        inputs = np.concatenate([load_arrays(spec.data_file)[0] for spec in self.specs])
        self.validation = inputs, self.initial_model(inputs)
        self.in_use: list[float] = []

    def initial_model(self, inputs: np.ndarray) -> np.ndarray:
        """The classes that the run's initial weights say."""
        with MemoryServer(self.settings) as server:
            spec = replace(self.specs[0], name="first-look")
            with self.open(spec, server.link()) as device, torch.no_grad():
                _ = device.model  # checks in
                return compute_of(device).module.eval()(torch.from_numpy(inputs)).argmax(1).numpy()

    def arguments(self, spec: DeviceSpec) -> dict[str, Any]:
        data = load_arrays(spec.data_file)
        model = partial(build_device_model, spec, data[0].shape[1:])
        usual = {"run": RUN, "device_id": spec.name, "allow": COLUMNS, "export": "never"}
        given = {**usual, "model": model, "data": data}
        if spec is self.specs[0]:
            given |= {"validation_data": self.validation, "on_event": self.events.append}
        return given

    def open(self, spec: DeviceSpec, link: Any) -> Device:
        return open_device(server=link, state_dir=self.work / spec.name, **self.arguments(spec))

    def play(self, *, restarting: bool = False) -> None:
        """Runs the fleet for `FIRST_ROUNDS` decisions of the first device, or until the run's end."""
        with MemoryServer(self.settings) as server:
            devices = [self.open(spec, server.link()) for spec in self.specs]
            self.in_use.append(accuracy(devices[0].model, self.validation))
            for _ in range(400):
                for place, device in enumerate(devices):
                    device.step(0)
                    if restarting and place == 0:
                        device.close(leave=False)
                        devices[0] = self.open(self.specs[0], server.link())
                if len(self.decisions) > len(self.in_use) - 1:
                    self.in_use.append(accuracy(devices[0].model, self.validation))
                if len(self.in_use) > FIRST_ROUNDS or self.events.kinds()[-1:] == ["finished"]:
                    break
            self.reported = server.store.history.figures(RUN, "replaced", "validation")
            for device in devices:
                device.close()

    @property
    def decisions(self) -> Sequence[Any]:
        return [event for event in self.events if event.kind in ("delivered", "kept")]

    @property
    def scores(self) -> list[list[float]]:
        """Accuracies of the received and the trained models before each decision."""
        result: list[list[float]] = [[]]
        for event in self.events:
            if event.kind == "scored" and event.values["split"].startswith("validation"):
                result[-1].append(event.values["accuracy"])
            elif event in self.decisions:
                result.append([])
        return result[:-1]


@pytest.mark.parametrize(
    ("name", "rounds"),
    [*((name, None) for name in (*FLEET_MODEL, *NO_FLEET_MODEL)), ("fedavg", 0), ("feddkd", 0)],
)
def test_the_app_gets_the_best_of_the_models_that_there_are(name: str, rounds: int | None, tmp_path: Path) -> None:
    fleet = Chosen(name, tmp_path, rounds)
    fleet.play()
    assert fleet.decisions
    accuracies = zip(fleet.in_use, fleet.in_use[1:], fleet.decisions, fleet.scores, strict=False)
    for before, after, decision, scores in accuracies:
        best = max(scores)
        assert decision.values["accuracy"] == pytest.approx(best)
        assert after == pytest.approx(max(best, before)), decision.text
        assert (decision.kind == "delivered") == (best >= before - 1e-9)
    received = [decision for decision in fleet.decisions if decision.values.get("received")]
    assert bool(received) == (name in FLEET_MODEL)
    told = {(decision.round, decision.kind == "delivered") for decision in fleet.decisions}
    assert told >= {(row.round, bool(row.sum)) for row in fleet.reported} != set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["dafkd exact", "fedavg"])
def test_a_device_that_restarts_in_every_turn_chooses_the_same(name: str, tmp_path: Path) -> None:
    """With `dafkd exact` the model is received in one step and chosen in the next."""
    undisturbed, restarting = Chosen(name, tmp_path / "a"), Chosen(name, tmp_path / "b")
    undisturbed.play()
    restarting.play(restarting=True)
    assert restarting.in_use == undisturbed.in_use
    assert [decision.values for decision in restarting.decisions] == [
        decision.values for decision in undisturbed.decisions
    ]
