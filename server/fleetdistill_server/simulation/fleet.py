"""Simulated fleets: the real engine, store, messages and device halves on one machine.

`simulate` partitions a data set over devices, runs a whole training over one of two links, and says what each device
gained against training alone. Over `memory` everything happens in this process, one step after the other; over `grpc`
front, engine and devices are processes of their own on the loopback. For one seed both give the same figures.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import PREDICTORS
from fleetdistill.names import unknown_name
from fleetdistill.training.figures import Counts
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.simulation.controls.fedavg import check_fedavg, run_fedavg_control
from fleetdistill_server.simulation.controls.local_only import note_start, train_fleet_alone
from fleetdistill_server.simulation.data.datasets import Dataset, load_dataset
from fleetdistill_server.simulation.data.partition import partition
from fleetdistill_server.simulation.folder import IfThere, open_folder
from fleetdistill_server.simulation.links.links import run_over_grpc, run_over_memory
from fleetdistill_server.simulation.progress import OnProgress, Progress, watcher
from fleetdistill_server.simulation.report.controls import Controls
from fleetdistill_server.simulation.report.history import read_history
from fleetdistill_server.simulation.report.plots import load_matplotlib
from fleetdistill_server.simulation.report.report import Outcome, make_report
from fleetdistill_server.simulation.report.results import FleetReport
from fleetdistill_server.simulation.spec.hostile import ATTACKS
from fleetdistill_server.simulation.spec.plan import (
    RUN,
    Fleet,
    hold_out_proxy,
    limit_test_part,
    make_run_config,
    make_specs,
    open_store,
    partition_settings,
    proxy_per_class,
)
from fleetdistill_server.simulation.spec.settings import Simulation


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a simulation; another start goes on from there.

    Attributes:
        report: Of the rounds that were completed, as it was written; None before the first one.
    """

    def __init__(self, report: FleetReport | None) -> None:
        super().__init__("the simulation was interrupted")
        self.report = report


def simulate(
    wanted: Simulation, on_progress: OnProgress = lambda progress: None, *, if_there: IfThere = "refuse"
) -> FleetReport:
    """Runs a simulation and writes report.json, fleet.png and the exported models under `out`.

    Whenever it is interrupted, killed included, another start with `if_there="resume"` ends as if nothing had happened.

    Args:
        wanted: What to simulate.
        on_progress: Called after every round of the fleet and of the controls.
        if_there: What to do with an earlier simulation in `out`; see `open_folder`.

    Raises:
        ConfigurationError: A setting is out of range, or `out` holds another simulation.
        DataError: The data set or the partition cannot be had.
        RunError: The run failed.
        Interrupted: Ctrl-C; the report of the completed rounds has been written.
    """
    started = time.monotonic()
    _check(wanted)
    work, lock = open_folder(wanted, if_there)
    with lock:
        data = load_dataset(
            wanted.dataset,
            wanted.data_dir,
            train_limit=wanted.train_limit,
            image_size=wanted.image_size,
            seed=wanted.seed,
        )
        data = limit_test_part(data, wanted)
        wanted = replace(wanted, proxy_per_class=proxy_per_class(wanted, data))
        fleet = _prepare(wanted, data, work)
        alone: dict[str, list[Counts]] = {}
        load_matplotlib()
        try:
            run = run_over_memory if wanted.link == "memory" else run_over_grpc
            run(fleet.config, fleet.specs, work, watcher("fleet", fleet.config, on_progress)).close()
            if wanted.with_alone:
                alone = _train_alone(wanted, fleet, on_progress)
            fedavg = run_fedavg_control(wanted, fleet, on_progress)
        except KeyboardInterrupt as interrupt:
            done = Controls(alone, None)
            raise Interrupted(_report(wanted, fleet, done, started, finished=False)) from interrupt
        report = _report(wanted, fleet, Controls(alone, fedavg), started, finished=True)
    assert report is not None  # a run has at least a round
    return report


def _prepare(wanted: Simulation, data: Dataset, work: Path) -> Fleet:
    """Deals the data out and makes the run; a second time it makes the same again."""
    data = hold_out_proxy(wanted, data, work)
    labels, settings = data.train_labels.numpy(), partition_settings(wanted, data)
    split = partition(wanted.partition, labels, wanted.devices, wanted.seed, **settings)
    config = make_run_config(wanted, data, work)
    specs = make_specs(wanted, data, split, work)
    check_fedavg(wanted, config)
    initial = build_method(config).initial()
    note_start(initial, specs)
    return Fleet(data, split, config, specs, initial, work)


def _report(
    wanted: Simulation, fleet: Fleet, controls: Controls, started: float, *, finished: bool
) -> FleetReport | None:
    """The report of the completed rounds; None without any."""
    with open_store(fleet) as store:
        if not any(row["status"] == "closed" for row in store.rounds(RUN)):
            return None
        return make_report(
            Outcome(
                wanted=wanted,
                store=store,
                config=fleet.config,
                data=fleet.data,
                split=fleet.split,
                specs=fleet.specs,
                history=read_history(store, RUN, fleet.specs),
                controls=controls,
                seconds=time.monotonic() - started,
                finished=finished,
            )
        )


def _train_alone(wanted: Simulation, fleet: Fleet, on_progress: OnProgress) -> dict[str, list[Counts]]:
    """Every device's model by itself."""
    completed, total = 0, wanted.rounds_of_controls * len(fleet.specs)

    def after_rounds(more: int) -> None:
        nonlocal completed
        completed += more
        on_progress(Progress("alone", completed, total))

    with open_store(fleet) as store:
        history = read_history(store, RUN, fleet.specs)
    return train_fleet_alone(wanted, fleet.config, fleet.initial, fleet.specs, history, after_rounds)


def _check(wanted: Simulation) -> None:
    if wanted.link not in ("memory", "grpc"):
        raise ConfigurationError(f"link is {wanted.link!r}, must be memory or grpc")
    for name in ("devices", "rounds", "control_rounds", "threads", "train_limit", "test_limit"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            why = ": a simulation ends with its last round" if name == "rounds" else ""
            raise ConfigurationError(f"{name} is {value}, must be at least 1{why}")
    if not 0 <= wanted.validation_share < 1:
        raise ConfigurationError(f"validation_share is {wanted.validation_share}, must be at least 0 and below 1")
    if wanted.hostile and (wanted.attack not in ATTACKS or not 0 < wanted.hostile < wanted.devices):
        raise ConfigurationError(
            f"{wanted.hostile} of {wanted.devices} devices are to attack by {wanted.attack!r}; fewer than all can, by "
            f"one of {', '.join(ATTACKS)}"
        )
    if wanted.seed < 0:
        raise ConfigurationError(f"seed is {wanted.seed}, must be at least 0")
    for name in wanted.predictors:
        if name not in PREDICTORS:
            raise ConfigurationError(unknown_name("predictor", name, PREDICTORS))
