"""Simulated fleets: the real engine, store, messages and device halves on one machine.

`simulate` partitions a data set over devices, runs a whole training over one of two links, and says what each device
gained against training alone. Over `memory` everything happens in this process, one step after the other; over `grpc`
front, engine and devices are processes of their own on the loopback. For one seed both give the same figures.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.figures import Counts
from fleetdistill.knowledge import ModelParameters
from fleetdistill.model import parameter_count
from fleetdistill.models import build_model
from fleetdistill.models.space import PREDICTORS
from fleetdistill_server.contract import build_method
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.run_config import RunConfig, run_config
from fleetdistill_server.simulation.alone import score_start, train_alone
from fleetdistill_server.simulation.comparison import cost_of
from fleetdistill_server.simulation.controls import Controls, FedAvgControl
from fleetdistill_server.simulation.datasets import Dataset, load_dataset, stratified_rows
from fleetdistill_server.simulation.device import DeviceSpec
from fleetdistill_server.simulation.history import FleetHistory, read_history
from fleetdistill_server.simulation.links import run_over_grpc, run_over_memory
from fleetdistill_server.simulation.partition import (
    Ints,
    Partition,
    hold_out_validation,
    partition,
    partition_parameters,
    proxy_rows,
)
from fleetdistill_server.simulation.report import FleetReport, Outcome, make_report
from fleetdistill_server.simulation.scores import START, append_scores
from fleetdistill_server.simulation.settings import Simulation
from fleetdistill_server.store import Store

RUN = "simulation"
PROXY_PER_CLASS = 8
DIGITS_MODELS = ("digits_linear", "digits_mlp_small", "digits_mlp_large", "digits_cnn_small", "digits_cnn_large")
RESNET_MODELS = ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12")


@dataclass(frozen=True)
class Progress:
    """How far a simulation is: completed rounds, and the mean accuracy on the test part where it is known."""

    completed: int
    rounds: int
    accuracy: float | None


def simulate(wanted: Simulation, on_progress: Callable[[Progress], None] = lambda progress: None) -> FleetReport:
    """Runs a simulation and writes report.json, fleet.png and the exported models under `out`.

    Raises:
        ConfigurationError: A setting is out of range.
        DataError: The data set or the partition cannot be had.
        RunError: The run failed.
    """
    started = time.monotonic()
    _check(wanted)
    data = load_dataset(
        wanted.dataset,
        wanted.data_dir,
        train_limit=wanted.train_limit,
        image_size=wanted.image_size,
        seed=wanted.seed,
    )
    data = _limit_test_part(data, wanted)
    work = _fresh(wanted.out / "work")
    wanted = replace(wanted, proxy_per_class=proxy_per_class(wanted, data))
    data = hold_out_proxy(wanted, data, work)
    split = partition(wanted.partition, data.train_labels.numpy(), wanted.devices, wanted.seed, **_shape(wanted, data))
    config = make_run_config(wanted, data, work)
    specs = make_specs(wanted, data, split, work)
    _check_fedavg(wanted, config)
    initial = build_method(config).initial()
    note_start(initial, specs)
    watch = _watcher(wanted.rounds_to_complete, on_progress)
    store = (run_over_memory if wanted.link == "memory" else run_over_grpc)(config, specs, work, watch)
    try:
        history = read_history(store, RUN, specs)
        controls = Controls(
            alone=train_fleet_alone(wanted, config, initial, specs, history) if wanted.with_alone else {},
            fedavg=run_fedavg(wanted, config, data, specs, history, store),
        )
        return make_report(
            Outcome(
                wanted=wanted,
                store=store,
                config=config,
                data=data,
                split=split,
                specs=specs,
                history=history,
                controls=controls,
                seconds=time.monotonic() - started,
            )
        )
    finally:
        store.close()


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


def make_run_config(wanted: Simulation, data: Dataset, work: Path) -> RunConfig:
    """The run.toml of a simulation, as settings."""
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
            "evaluation": {"data": str(work / "test.npz")},
            "server": {
                "listen": "127.0.0.1:0",
                "store": str(work / "store"),
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


def run_fedavg(
    wanted: Simulation,
    config: RunConfig,
    data: Dataset,
    specs: list[DeviceSpec],
    history: FleetHistory,
    store: Store,
) -> FedAvgControl | None:
    """FedAvg on the same data, in memory; the run itself, with its history and store, where that is FedAvg."""
    plan = config.method_config()
    if wanted.method == "fedavg":
        return FedAvgControl(specs[0].model, asdict(plan), history, cost_of(store, RUN, len(specs)))
    if not wanted.with_fedavg:
        return None
    model = _largest_model(wanted, data)
    settings = {"local_epochs": _passes(config), "participation_ratio": plan.participation_ratio}
    rounds = wanted.rounds_of_controls
    control = replace(wanted, method="fedavg", models=(model,), settings=settings, rounds=rounds)
    work = Path(specs[0].state_dir).parent
    control_config = make_run_config(control, data, work)
    (work / "fedavg").mkdir()
    specs = [replace(spec, model=model, state_dir=str(work / "fedavg" / spec.name)) for spec in specs]
    note_start(build_method(control_config).initial(), specs)
    own_store = run_over_memory(control_config, specs, work, lambda store: None)
    try:
        plan = asdict(control_config.method_config())
        return FedAvgControl(model, plan, read_history(own_store, RUN, specs), cost_of(own_store, RUN, len(specs)))
    finally:
        own_store.close()


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


def train_fleet_alone(
    wanted: Simulation,
    config: RunConfig,
    initial: ModelParameters | None,
    specs: list[DeviceSpec],
    history: FleetHistory,
) -> dict[str, list[Counts]]:
    """Trains every device's model by itself, with as many local epochs as in the fleet, or for `control_rounds`."""
    torch.set_num_threads(config.run.threads)
    rounds = wanted.rounds_of_controls

    def active(name: str) -> list[bool]:
        part = [] if wanted.one_exchange else history.took_part[name]
        return [*part, *[True] * (rounds - len(part))][:rounds]

    return {spec.name: train_alone(spec, config, initial, active(spec.name)) for spec in specs}


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
    if wanted.seed < 0:
        raise ConfigurationError(f"seed is {wanted.seed}, must be at least 0")
    if unknown := set(wanted.predictors) - set(PREDICTORS):
        raise ConfigurationError(f"unknown predictors {sorted(unknown)}, expected some of {', '.join(PREDICTORS)}")


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


def _fresh(work: Path) -> Path:
    """Makes the folder anew, but only if it is one of ours."""
    marker = work / "made-by-fleetdistill"
    if work.exists() and not marker.exists() and any(work.iterdir()):
        raise DataError(f"{work} is not empty and was not made by a simulation; choose another out folder")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    marker.write_text(json.dumps({"run": RUN}))
    return work.resolve()


def _watcher(rounds: int, on_progress: Callable[[Progress], None]) -> Callable[[Store], None]:
    """Calls `on_progress` when another round has been completed."""
    last = -1

    def watch(store: Store) -> None:
        nonlocal last
        row = store.run(RUN)
        completed = int(row["completed_rounds"]) if row else 0
        if completed != last:
            last = completed
            on_progress(Progress(completed, rounds, _latest_accuracy(store)))

    return watch


def _latest_accuracy(store: Store) -> float | None:
    closed = [row["round"] for row in store.rounds(RUN) if row["status"] == "closed"]
    if not closed:
        return None
    rates = [row["sum"] / row["count"] for row in store.figures(RUN, "accuracy", "test") if row["round"] == closed[-1]]
    return sum(rates) / len(rates) if rates else None
