"""Simulated fleets: the real engine, store, messages and device halves on one machine.

`simulate` partitions a data set over devices, runs a whole training over one of two links, and says what each device
gained against training alone. Over `memory` everything happens in this process, one step after the other; over `grpc`
front, engine and devices are processes of their own on the loopback. For one seed both give the same figures.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.models import PREDICTORS, build_model
from fleetdistill.names import unknown_name
from fleetdistill.training.figures import Counts
from fleetdistill.training.model import parameter_count
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.simulation.controls.local_only import score_start
from fleetdistill_server.simulation.controls.run_controls import fedavg_specs, run_fedavg, train_fleet_alone
from fleetdistill_server.simulation.data.datasets import Dataset, load_dataset, stratified_rows
from fleetdistill_server.simulation.data.partition import (
    Ints,
    Partition,
    hold_out_validation,
    partition,
    partition_parameters,
    proxy_rows,
)
from fleetdistill_server.simulation.folder import IfThere, open_folder
from fleetdistill_server.simulation.links.links import Watch, run_over_grpc, run_over_memory
from fleetdistill_server.simulation.report.comparison import cost_of
from fleetdistill_server.simulation.report.controls import Controls, FedAvgControl
from fleetdistill_server.simulation.report.history import read_history
from fleetdistill_server.simulation.report.plots import load_matplotlib
from fleetdistill_server.simulation.report.report import FleetReport, Outcome, make_report
from fleetdistill_server.simulation.report.scores import START, append_scores
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.hostile import ATTACKS
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store

RUN = "simulation"
PATIENCE_SECONDS = 1e7
"""Nobody is late in a simulation: one that is resumed after months has all its devices, and their open asks."""
Phase = Literal["fleet", "alone", "fedavg"]
PROXY_PER_CLASS = 8
DIGITS_MODELS = ("digits_linear", "digits_mlp_small", "digits_mlp_large", "digits_cnn_small", "digits_cnn_large")
RESNET_MODELS = ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12")


@dataclass(frozen=True)
class Progress:
    """How far a simulation is.

    Attributes:
        phase: `fleet`, then the controls: `alone` and `fedavg`.
        completed, total: Rounds of it; of `alone` those of all devices together.
        accuracy: Of the fleet's devices on the test part after the last round, their mean, where it is known.
    """

    phase: Phase
    completed: int
    total: int
    accuracy: float | None = None


OnProgress = Callable[[Progress], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a simulation; another start goes on from there.

    Attributes:
        report: Of the rounds that were completed, as it was written; None before the first one.
    """

    def __init__(self, report: FleetReport | None) -> None:
        super().__init__("the simulation was interrupted")
        self.report = report


@dataclass(frozen=True)
class _Fleet:
    """A simulation that is ready to run: data, partition, run and devices, in its folder."""

    data: Dataset
    split: Partition
    config: RunConfig
    specs: list[DeviceSpec]
    initial: ModelParameters | None
    work: Path


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
        data = _limit_test_part(data, wanted)
        wanted = replace(wanted, proxy_per_class=proxy_per_class(wanted, data))
        fleet = _prepare(wanted, data, work)
        alone: dict[str, list[Counts]] = {}
        load_matplotlib()
        try:
            run = run_over_memory if wanted.link == "memory" else run_over_grpc
            run(fleet.config, fleet.specs, work, _watcher("fleet", fleet.config, on_progress)).close()
            if wanted.with_alone:
                alone = _train_alone(wanted, fleet, on_progress)
            fedavg = _fedavg(wanted, fleet, on_progress)
        except KeyboardInterrupt as interrupt:
            done = Controls(alone, None)
            raise Interrupted(_report(wanted, fleet, done, started, finished=False)) from interrupt
        report = _report(wanted, fleet, Controls(alone, fedavg), started, finished=True)
    assert report is not None  # a run has at least a round
    return report


def _prepare(wanted: Simulation, data: Dataset, work: Path) -> _Fleet:
    """Deals the data out and makes the run; a second time it makes the same again."""
    data = hold_out_proxy(wanted, data, work)
    split = partition(wanted.partition, data.train_labels.numpy(), wanted.devices, wanted.seed, **_shape(wanted, data))
    config = make_run_config(wanted, data, work)
    specs = make_specs(wanted, data, split, work)
    _check_fedavg(wanted, config)
    initial = build_method(config).initial()
    note_start(initial, specs)
    return _Fleet(data, split, config, specs, initial, work)


def _store(fleet: _Fleet) -> contextlib.closing[Store]:
    return contextlib.closing(Store.open(Path(fleet.config.server.store)))


def _report(
    wanted: Simulation, fleet: _Fleet, controls: Controls, started: float, *, finished: bool
) -> FleetReport | None:
    """The report of the completed rounds; None without any."""
    with _store(fleet) as store:
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


def _train_alone(wanted: Simulation, fleet: _Fleet, on_progress: OnProgress) -> dict[str, list[Counts]]:
    """Every device's model by itself."""
    completed, total = 0, wanted.rounds_of_controls * len(fleet.specs)

    def after_rounds(more: int) -> None:
        nonlocal completed
        completed += more
        on_progress(Progress("alone", completed, total))

    with _store(fleet) as store:
        history = read_history(store, RUN, fleet.specs)
    return train_fleet_alone(wanted, fleet.config, fleet.initial, fleet.specs, history, after_rounds)


def hold_out_proxy(wanted: Simulation, data: Dataset, work: Path) -> Dataset:
    """Writes the proxy set, where there is to be one, and returns the data set without it."""
    per_class = proxy_per_class(wanted, data)
    if not per_class:
        return data
    taken, left = proxy_rows(data.train_labels.numpy(), per_class)
    inputs, labels = data.train_images.numpy()[taken], data.train_labels.numpy()[taken]
    np.savez(_proxy_file(work), inputs=inputs, labels=labels)
    return data.with_training_rows(left)


def proxy_per_class(wanted: Simulation, data: Dataset) -> int:
    """Images of each class that are held out; see `Simulation.proxy_per_class`."""
    if wanted.proxy_per_class is not None:
        return wanted.proxy_per_class
    smallest = int(data.train_labels.bincount().min())
    return min(PROXY_PER_CLASS, smallest // 2) if _server_half(wanted).proxy_set else 0


def _server_half(wanted: Simulation) -> type[ServerMethod]:
    """Of the form that the settings choose."""
    return server_class(wanted.method, wanted.configuration())


def _proxy_file(work: Path) -> Path:
    return work / "proxy.npz"


def _proxy_section(wanted: Simulation, data: Dataset, work: Path) -> dict[str, str]:
    if not _server_half(wanted).proxy_set:
        return {}
    licence = "that of the data set it is taken from"
    return {"data": str(_proxy_file(work)), "name": f"{data.name}-proxy", "licence": licence}


def make_run_config(wanted: Simulation, data: Dataset, work: Path, store: Path | None = None) -> RunConfig:
    """The run.toml of a simulation, as settings; `store` is `work/store` by default."""
    extractor, server = ("digits_extractor", "digits_server") if _is_small(data) else ("resnet_extractor", "resnet20")
    if _server_half(wanted).server_reads_inputs:
        server = _largest_model(wanted, data)
    return run_config(
        {
            "run": {
                "name": RUN,
                "method": wanted.method,
                "rounds": wanted.rounds_to_complete,
                "seed": wanted.seed,
                "min_devices": wanted.devices,
                "deadline_seconds": PATIENCE_SECONDS,
                "threads": wanted.threads,
            },
            "contract": {
                "classes": list(data.classes),
                "input_shape": list(data.train_images.shape[1:]),
                "knowledge_type": wanted.knowledge_type,
            },
            "model": {"extractor": extractor, "server": server, "device": _common_model(wanted, data)},
            "method": dict(wanted.settings),
            "proxy": _proxy_section(wanted, data, work),
            "evaluation": {"data": str(work / "test.npz"), "trusted_rows": 0},  # test rows judge nobody
            "server": {
                "listen": "127.0.0.1:0",
                "store": str(store or work / "store"),
                "lease_seconds": PATIENCE_SECONDS,
                "torch_device": wanted.torch_device,
            },
        }
    )


def make_specs(wanted: Simulation, data: Dataset, split: Partition, work: Path) -> list[DeviceSpec]:
    """Gives each device its part of the data, as files, and its model."""
    common = _common_model(wanted, data)
    models = (common,) if common else _models(wanted, data)
    predictors = wanted.predictors or tuple(PREDICTORS)
    test_file = work / "test.npz"
    np.savez(test_file, inputs=data.test_images.numpy(), labels=data.test_labels.numpy())
    specs = []
    for number, rows in enumerate(split.indices):
        name = f"device-{number:0{len(str(wanted.devices - 1))}d}"
        own, held_out = hold_out_validation(data.train_labels.numpy(), rows, wanted.validation_share, wanted.seed)
        specs.append(
            DeviceSpec(
                name=name,
                model=models[number % len(models)],
                predictor=predictors[number % len(predictors)],
                attack=wanted.attack if number < wanted.hostile else "",
                seed=wanted.seed,
                classes=len(data.classes),
                data_file=_save_rows(data, own, work / f"{name}.npz"),
                validation_file=_save_rows(data, held_out, work / f"{name}-validation.npz") if len(held_out) else "",
                test_file=str(test_file),
                state_dir=str(work / name),
                run=RUN,
            )
        )
    return specs


def _save_rows(data: Dataset, rows: Ints, file: Path) -> str:
    np.savez(file, inputs=data.train_images[rows].numpy(), labels=data.train_labels[rows].numpy())
    return str(file)


def _models(wanted: Simulation, data: Dataset) -> tuple[str, ...]:
    return wanted.models or (DIGITS_MODELS if _is_small(data) else RESNET_MODELS)


def _common_model(wanted: Simulation, data: Dataset) -> str:
    """The largest of the models, where the method wants one for all devices; empty where it does not."""
    if not _server_half(wanted).same_architecture:
        return ""
    return _largest_model(wanted, data)


def _largest_model(wanted: Simulation, data: Dataset) -> str:
    shape, classes = tuple(data.train_images.shape[1:]), len(data.classes)
    return max(_models(wanted, data), key=lambda name: _parameters(name, shape, classes))


@functools.cache
def _parameters(model: str, input_shape: tuple[int, ...], classes: int) -> int:
    """Parameters of a model, which is built once to count them."""
    return parameter_count(build_model(model, input_shape=input_shape, classes=classes))


def note_start(initial: ModelParameters | None, specs: list[DeviceSpec]) -> None:
    """Scores the models that the devices start from: that is what a device has that no round takes.

    Args:
        initial: What the method gives every device at the start.
        specs: The devices.
    """
    for spec in specs:
        append_scores(spec.scores_file, START, score_start(spec, initial).confusion.tolist())


def _fedavg(wanted: Simulation, fleet: _Fleet, on_progress: OnProgress) -> FedAvgControl | None:
    """FedAvg on the same data; the run itself, with its history and store, where that is FedAvg."""
    config, specs = fleet.config, fleet.specs
    plan = config.method_config()
    if wanted.method == "fedavg":
        with _store(fleet) as store:
            history, cost = read_history(store, RUN, specs), cost_of(store, RUN, len(specs))
        return FedAvgControl(specs[0].model, asdict(plan), history, cost)
    if not wanted.with_fedavg:
        return None
    model = _largest_model(wanted, fleet.data)
    settings = {"local_epochs": _passes(config), "participation_ratio": plan.participation_ratio}
    rounds = wanted.rounds_of_controls
    control = replace(wanted, method="fedavg", models=(model,), settings=settings, rounds=rounds)
    work = fleet.work / "fedavg"
    control_config = make_run_config(control, fleet.data, fleet.work, store=work / "store")
    specs = fedavg_specs(specs, model, work)
    note_start(build_method(control_config).initial(), specs)
    return run_fedavg(control_config, model, specs, work, _watcher("fedavg", control_config, on_progress))


def _passes(config: RunConfig) -> int:
    """Passes over the labels in a round of the method; the first one may have a warm-up on top."""
    return int(config.method_config().cross_entropy_epochs(2))


def _check_fedavg(wanted: Simulation, config: RunConfig) -> None:
    """Before the fleet runs: FedAvg trains on labels only, so it has no round that makes no pass over them."""
    if wanted.with_fedavg and wanted.method != "fedavg" and _passes(config) < 1:
        raise ConfigurationError(
            f"{wanted.method} makes no pass over the labels in a round with these settings, and FedAvg, its control, "
            "needs one; simulate without FedAvg (with_fedavg, --no-controls), or let the method learn from labels"
        )


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


def _limit_test_part(data: Dataset, wanted: Simulation) -> Dataset:
    if wanted.test_limit is None or wanted.test_limit >= len(data.test_labels):
        return data
    rows = stratified_rows(data.test_labels.numpy(), wanted.test_limit, wanted.seed)
    return replace(data, test_images=data.test_images[rows], test_labels=data.test_labels[rows])


def _shape(wanted: Simulation, data: Dataset) -> dict[str, Any]:
    """What the partition needs to be told, of the settings that the simulation has under the same names."""
    needed = partition_parameters(wanted.partition)
    return {name: data.train_clients if name == "clients" else getattr(wanted, name) for name in needed}


def _is_small(data: Dataset) -> bool:
    return tuple(data.train_images.shape[1:]) == (1, 8, 8)


def _watcher(phase: Phase, config: RunConfig, on_progress: OnProgress) -> Watch:
    """Calls `on_progress` when another round of a run has been completed."""
    last = -1

    def watch(store: Store) -> None:
        nonlocal last
        row = store.run(RUN)
        completed = int(row["completed_rounds"]) if row else 0
        if completed != last:
            last = completed
            on_progress(Progress(phase, completed, config.run.rounds, _latest_accuracy(store)))

    return watch


def _latest_accuracy(store: Store) -> float | None:
    closed = [row["round"] for row in store.rounds(RUN) if row["status"] == "closed"]
    if not closed:
        return None
    rates = [row["sum"] / row["count"] for row in store.figures(RUN, "accuracy", "test") if row["round"] == closed[-1]]
    return sum(rates) / len(rates) if rates else None
