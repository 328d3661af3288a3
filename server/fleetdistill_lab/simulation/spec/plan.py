"""Plans a simulation: its run configuration, its devices with their data files, and the proxy set."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.classstats_secure.config import CERTIFICATES, SumSettings
from fleetdistill.models import PREDICTORS, build_model, path_of
from fleetdistill.training.model import parameter_count
from fleetdistill_lab.simulation.data.datasets import Dataset, stratified_rows
from fleetdistill_lab.simulation.data.partition import partition, partition_parameters
from fleetdistill_lab.simulation.data.split import Ints, Partition
from fleetdistill_lab.simulation.data.test_parts import Dealt, deal_tests, hold_out_validation, proxy_rows
from fleetdistill_lab.simulation.spec.arrays import save_arrays, slice_of
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.methods import modules_of, server_class
from fleetdistill_server.methods.base import Needs, pick_torch_device
from fleetdistill_server.store.store import Store

RUN = "simulation"
NO_DEADLINE_SECONDS = 1e7
"""Deadline and lease without simulated time, in seconds; long enough that neither expires before a resume."""
PROXY_PER_CLASS = 8
DIGITS_MODELS = ("digits_linear", "digits_mlp_small", "digits_mlp_large", "digits_cnn_small", "digits_cnn_large")
RESNET_MODELS = ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12")


@dataclass(frozen=True)
class Fleet:
    """A simulation that is ready to run.

    Attributes:
        data: The data set without the proxy set's rows and without images.
        split: Partition of the training data over the devices.
        config: Configuration of the run.
        specs: The devices.
        initial: Initial weights that the method distributes; None if it distributes none.
        work: The simulation's work folder.
    """

    data: Dataset
    split: Partition
    config: RunConfig
    specs: list[DeviceSpec]
    initial: ModelParameters | None
    work: Path


def hold_out_proxy(wanted: Simulation, data: Dataset, work: Path) -> Dataset:
    """Writes the proxy set, if the simulation has one, and returns the data set without its rows."""
    per_class = proxy_per_class(wanted, data)
    if not per_class:
        return data
    taken, left = proxy_rows(data.train_labels.numpy(), per_class)
    inputs, labels = data.train_images.numpy()[taken], data.train_labels.numpy()[taken]
    np.savez(_proxy_file(work), inputs=inputs, labels=labels)
    return data.with_training_rows(left)


def proxy_per_class(wanted: Simulation, data: Dataset) -> int:
    """Returns the number of images per class in the proxy set; see `Simulation.proxy_per_class`."""
    if wanted.proxy_per_class is not None:
        return wanted.proxy_per_class
    smallest = int(data.train_labels.bincount().min())
    return min(PROXY_PER_CLASS, smallest // 2) if _uses_proxy_set(wanted) else 0


def _needs(wanted: Simulation) -> Needs:
    """Returns the method's requirements under the simulation's settings."""
    config = wanted.configuration()
    return server_class(wanted.method).needs(config)


def _uses_proxy_set(wanted: Simulation) -> bool:
    return _needs(wanted).proxy_set or _needs(wanted).server_proxy_set


def _proxy_file(work: Path) -> Path:
    return work / "proxy.npz"


def _proxy_section(wanted: Simulation, data: Dataset, work: Path) -> dict[str, str]:
    if not _uses_proxy_set(wanted):
        return {}
    licence = "that of the data set it is taken from"
    return {"data": str(_proxy_file(work)), "name": f"{data.name}-proxy", "licence": licence}


def make_run_config(wanted: Simulation, data: Dataset, work: Path, store: Path | None = None) -> RunConfig:
    """Builds the run configuration of a simulation; `store` defaults to `work/store`."""
    server = "digits_server" if _is_small(data) else "resnet20"
    if _needs(wanted).server_reads_inputs:
        server = largest_model(wanted, data)
    extractor, server = path_of(wanted.extractor) or _usual_extractor(data), path_of(wanted.server_model) or server
    return run_config(
        {
            "run": {
                "name": RUN,
                "method": wanted.method,
                "import": _modules(wanted),
                "rounds": wanted.rounds_to_complete,
                "seed": wanted.seed,
                "min_devices": wanted.devices_to_begin,
                "devices_per_round": wanted.devices_per_round,
                "over_selection": wanted.over_selection,
                "quorum": wanted.quorum,
                **_deadline(wanted),
                "threads": wanted.threads,
            },
            "contract": {
                "classes": list(data.classes),
                "input_shape": list(data.train_images.shape[1:]),
                "knowledge_type": wanted.knowledge_type,
            },
            "model": {
                "extractor": extractor,
                "extractor_weights": wanted.extractor_weights,
                "server": server,
                "device": _device_model(wanted, data),
            },
            "method": {name: value for name, value in wanted.settings.items() if name != "roster_key"},  # has its own
            "proxy": _proxy_section(wanted, data, work),
            "evaluation": _evaluation(wanted, work),
            "server": {
                "listen": "127.0.0.1:0",
                "store": str(store or work / "store"),
                **({} if wanted.behaviour else {"lease_seconds": NO_DEADLINE_SECONDS}),
                "torch_device": wanted.torch_device,
            },
            "limits": _limits(wanted.devices),
        }
    )


def _evaluation(wanted: Simulation, work: Path) -> dict[str, Any]:
    """Returns the section [evaluation]. The test set must not filter answers, so no row is trusted."""
    if wanted.score == "none":
        return {}
    every = wanted.rounds_between_scores if wanted.score == "global" else 1
    return {"data": str(work / "test.npz"), "trusted_rows": 0, "every": every}


def _deadline(wanted: Simulation) -> dict[str, float]:
    """Returns the deadline as a setting of [run]; without simulated time, none expires."""
    if wanted.behaviour is None:
        return {"deadline_seconds": NO_DEADLINE_SECONDS}
    return {} if wanted.deadline_seconds is None else {"deadline_seconds": wanted.deadline_seconds}


def _limits(devices: int) -> dict[str, int]:
    """Returns the limits that would slow down a fleet on one machine: all devices check in within seconds."""
    usual = Limits()
    names = ("devices", "open_calls", "new_devices_per_minute", "new_devices_per_minute_per_address")
    return {name: max(getattr(usual, name), 2 * devices) for name in names}


def make_specs(
    wanted: Simulation, data: Dataset, split: Partition, work: Path, own_tests: Sequence[int] = ()
) -> list[DeviceSpec]:
    """Assigns each device its model and its part of the data, and writes the data files.

    Args:
        wanted: The simulation.
        data: The data set.
        split: Partition of its training rows.
        work: The simulation's work folder.
        own_tests: Number of each device's own test rows, which follow each other in the test set; empty for none.
    """
    models = device_models(wanted, data)
    predictors = wanted.predictors or tuple(PREDICTORS)
    modules = modules_of(wanted.method) if wanted.has_workers and not wanted.modules else _modules(wanted)
    save_arrays(work / "test.npz", data.test_images.numpy(), data.test_labels.numpy())
    test_file = _save_scored_rows(wanted, data, work)
    labels, seed = data.train_labels.numpy(), wanted.seed
    parts = [hold_out_validation(labels, rows, wanted.validation_share, seed) for rows in split.indices]
    data_files = _save_parts(data, [own for own, _ in parts], work / "train.npz")
    held_out_files = _save_parts(data, [held_out for _, held_out in parts], work / "validation.npz")
    own_test_files = _slices(work / "test.npz", own_tests or [0] * wanted.devices)
    torch_device = str(pick_torch_device(wanted.torch_device))
    configuration = wanted.configuration()
    keys = configuration.keys if isinstance(configuration, SumSettings) else ""
    specs: list[DeviceSpec] = []
    for number, (data_file, validation_file) in enumerate(zip(data_files, held_out_files, strict=True)):
        name = f"device-{number:0{len(str(wanted.devices - 1))}d}"
        specs.append(
            DeviceSpec(
                name=name,
                model=models[number % len(models)],
                predictor=predictors[number % len(predictors)],
                attack=wanted.attack if number < wanted.hostile else "",
                seed=wanted.seed,
                classes=len(data.classes),
                data_file=data_file,
                validation_file=validation_file,
                test_file=test_file,
                own_test_file=own_test_files[number],
                state_dir=str(work / name),
                run=RUN,
                modules=tuple(modules),
                score_every=wanted.rounds_between_scores if wanted.scores_devices else 0,
                last_round=wanted.rounds_to_complete,
                top_k=wanted.top_k,
                torch_device=torch_device,
                keys=keys,
            )
        )
    if keys == CERTIFICATES and not specs[0].pki.exists():
        from fleetdistill_server.security.pki import make_authority

        make_authority(specs[0].pki)
    return specs


def _save_scored_rows(wanted: Simulation, data: Dataset, work: Path) -> str:
    """Writes the test rows on which device models are scored, and returns their file; all rows are in test.npz."""
    labels = data.test_labels.numpy()
    count = wanted.rows_scored(len(labels))
    if count == len(labels):
        return str(work / "test.npz")
    rows = stratified_rows(labels, count, wanted.seed)
    return save_arrays(work / "scored.npz", data.test_images[rows].numpy(), labels[rows])


def _modules(wanted: Simulation) -> list[str]:
    """Returns the modules that other processes must import to register the method."""
    if wanted.modules or wanted.link == "memory":
        return list(wanted.modules)
    return modules_of(wanted.method)


def _save_parts(data: Dataset, parts: Sequence[Ints], file: Path) -> list[str]:
    """Writes the devices' rows into one file, in the order of the devices; returns the name of each part.

    An empty part has an empty name, and without rows there is no file.
    """
    rows = np.concatenate(parts)
    if not len(rows):
        return [""] * len(parts)
    save_arrays(file, data.train_images[rows].numpy(), data.train_labels[rows].numpy())
    return _slices(file, [len(part) for part in parts])


def _slices(file: Path, sizes: Sequence[int]) -> list[str]:
    """Returns the names of consecutive rows of a file; empty for a size of 0."""
    stops = np.cumsum(sizes).tolist()
    return [slice_of(str(file), stop - size, stop) if size else "" for size, stop in zip(sizes, stops, strict=True)]


def _models(wanted: Simulation, data: Dataset) -> tuple[str, ...]:
    if wanted.model_paths:
        return wanted.model_paths
    if wanted.extractor and wanted.extractor != _usual_extractor(data):
        return (f"linear:{path_of(wanted.extractor)}",)
    return DIGITS_MODELS if _is_small(data) else RESNET_MODELS


def _usual_extractor(data: Dataset) -> str:
    """Returns the extractor of the built-in models for the data."""
    return "digits_extractor" if _is_small(data) else "resnet_extractor"


def _device_model(wanted: Simulation, data: Dataset) -> str:
    """Returns the value of `[model] device`: the largest model if the method requires one, else an empty string."""
    needs = _needs(wanted)
    return largest_model(wanted, data) if needs.same_architecture or needs.server_has_device_model else ""


def largest_model(wanted: Simulation, data: Dataset) -> str:
    """Returns the device model with the most parameters."""
    shape = tuple(data.train_images.shape[1:])
    classes = len(data.classes)
    return max(_models(wanted, data), key=lambda name: _parameters(name, shape, classes))


@functools.cache
def _parameters(model: str, input_shape: tuple[int, ...], classes: int) -> int:
    """Builds a model and returns its number of parameters; cached."""
    try:
        return parameter_count(build_model(model, input_shape=input_shape, classes=classes))
    except ConfigurationError as error:
        raise ConfigurationError(f"device model {model!r} with inputs of shape {list(input_shape)}: {error}") from error


def device_models(wanted: Simulation, data: Dataset) -> tuple[str, ...]:
    """Returns the models to assign in rotation; only the largest if all devices must run the same model."""
    return (largest_model(wanted, data),) if _needs(wanted).same_architecture else _models(wanted, data)


def models_in_words(wanted: Simulation) -> str:
    """Returns which models the devices have, as far as the settings say it without the data."""
    if wanted.extractor and not wanted.models:
        return f"those of the extractor {path_of(wanted.extractor)}"
    if len(wanted.model_paths) == 1:
        return wanted.model_paths[0]
    of = ", ".join(wanted.model_paths) or "the default networks"
    return f"only the largest of {of}" if _needs(wanted).same_architecture else f"{of} in turn"


def with_devices(wanted: Simulation, data: Dataset) -> Simulation:
    """Returns the simulation with its number of devices, which is that of the data set's clients if none is given."""
    if wanted.devices or data.train_clients is None:
        return wanted
    return replace(wanted, devices=len(data.train_clients.unique()))


def deal(wanted: Simulation, data: Dataset) -> Partition:
    """Partitions the training data over the devices."""
    labels = data.train_labels.numpy()
    settings = {**_required_settings(wanted, data), **wanted.partition_settings}
    return partition(wanted.partition_path, labels, wanted.devices, wanted.seed, **settings)


def deal_with_tests(wanted: Simulation, data: Dataset) -> Dealt:
    """Partitions the training data over the devices, and gives them test rows of their own if `test_part` says so."""
    return deal_tests(wanted.test_part, data, deal(wanted, data), wanted.seed)


def limit_test_set(data: Dataset, wanted: Simulation) -> Dataset:
    """Returns the data set with at most `test_limit` test images, a stratified subset."""
    if wanted.test_limit is None or wanted.test_limit >= len(data.test_labels):
        return data
    rows = stratified_rows(data.test_labels.numpy(), wanted.test_limit, wanted.seed)
    return data.with_test_rows(rows)


def _required_settings(wanted: Simulation, data: Dataset) -> dict[str, Any]:
    """Returns the partition's required parameters, from the simulation's settings of the same names."""
    needed = partition_parameters(wanted.partition_path)
    return {name: data.train_clients if name == "clients" else getattr(wanted, name) for name in needed}


def _is_small(data: Dataset) -> bool:
    return tuple(data.train_images.shape[1:]) == (1, 8, 8)


def open_store(fleet: Fleet) -> contextlib.closing[Store]:
    """Context manager that opens and closes the store of a simulation's run."""
    return contextlib.closing(Store.open(Path(fleet.config.server.store)))
