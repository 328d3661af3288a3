"""Runs the controls of a simulation. What is done is kept in its folder; another start does not do it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from fleetdistill.knowledge import ModelParameters
from fleetdistill.training.figures import Counts
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.simulation.controls.local_only import train_alone
from fleetdistill_server.simulation.links.links import Watch, run_over_memory
from fleetdistill_server.simulation.report.comparison import cost_of
from fleetdistill_server.simulation.report.controls import FedAvgControl
from fleetdistill_server.simulation.report.history import FleetHistory, read_history
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.settings import Simulation


def train_fleet_alone(
    wanted: Simulation,
    config: RunConfig,
    initial: ModelParameters | None,
    specs: Sequence[DeviceSpec],
    history: FleetHistory,
    after_rounds: Callable[[int], None],
) -> dict[str, list[Counts]]:
    """Trains every device's model by itself, with as many local epochs as in the fleet, or for `control_rounds`.

    Args:
        wanted, config, specs: The simulation, its run and its devices.
        initial: What the method gives every device at the start.
        history: The fleet's, for the rounds that a device took part in.
        after_rounds: Called with a number of rounds whenever a device has done so many more.
    """
    torch.set_num_threads(config.run.threads)
    rounds = wanted.rounds_of_controls

    def active(name: str) -> list[bool]:
        part = [] if wanted.one_exchange else history.took_part[name]
        return [*part, *[True] * (rounds - len(part))][:rounds]

    def counts_of(spec: DeviceSpec) -> list[Counts]:
        file = Path(f"{spec.state_dir}-alone.npz")
        if file.exists():
            after_rounds(rounds)
            return _load_counts(file)
        found = train_alone(spec, config, initial, active(spec.name), lambda: after_rounds(1))
        _save_counts(file, found)
        return found

    return {spec.name: counts_of(spec) for spec in specs}


def run_fedavg(control: RunConfig, model: str, specs: Sequence[DeviceSpec], work: Path, watch: Watch) -> FedAvgControl:
    """FedAvg on the same data, in memory.

    Args:
        control: Its run.
        model: The one that every device has.
        specs: The devices with it, and with state directories of their own.
        work: Its folder.
        watch: Is given its store after every step of a device.
    """
    run = control.run.name
    store = run_over_memory(control, list(specs), work, watch)
    try:
        plan = asdict(control.method_config())
        return FedAvgControl(model, plan, read_history(store, run, specs), cost_of(store, run, len(specs)))
    finally:
        store.close()


def fedavg_specs(specs: Sequence[DeviceSpec], model: str, work: Path) -> list[DeviceSpec]:
    """The same devices with that model."""
    work.mkdir(exist_ok=True)
    return [replace(spec, model=model, state_dir=str(work / spec.name)) for spec in specs]


def _save_counts(file: Path, counts: Sequence[Counts]) -> None:
    """Whole or not at all, wherever the process is killed."""
    new = file.with_suffix(".new.npz")
    np.savez(
        new,
        correct=[one.correct for one in counts],
        count=[one.count for one in counts],
        loss_sum=[one.loss_sum for one in counts],
        confusion=np.stack([one.confusion for one in counts]),
    )
    os.replace(new, file)


def _load_counts(file: Path) -> list[Counts]:
    with np.load(file) as kept:
        columns = (kept["correct"].tolist(), kept["count"].tolist(), kept["loss_sum"].tolist(), kept["confusion"])
    return [Counts(*row) for row in zip(*columns, strict=True)]
