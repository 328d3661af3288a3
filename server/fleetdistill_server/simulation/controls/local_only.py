"""The first control of every comparison: the same model, trained alone with the local training of the method."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError, ModelError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.figures import Counts
from fleetdistill.training.local_training import TensorData, as_tensor_data, evaluate, train_epochs
from fleetdistill.training.model import check_local_model
from fleetdistill.training.parameters import load_parameters
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.simulation.report.history import FleetHistory
from fleetdistill_server.simulation.spec.device import DeviceSpec, build_device_model, load_arrays
from fleetdistill_server.simulation.spec.score_log import START, append_scores
from fleetdistill_server.simulation.spec.settings import Simulation


def start_model(spec: DeviceSpec, initial: ModelParameters | None, input_shape: tuple[int, ...]) -> nn.Module:
    """The model that a device starts from: its own first weights, and over them what the method gives every device.

    Raises:
        ConfigurationError: What the method gives does not fit the device's model.
    """
    model: nn.Module = build_device_model(spec, input_shape)
    if initial is None:
        return model
    try:
        load_parameters(check_local_model(model).extractor if initial.scope == "extractor" else model, initial)
    except ModelError as error:
        text = f"the {initial.scope} that the run hands out does not fit model {spec.model!r}: {error}"
        raise ConfigurationError(f"{text}; choose models that begin alike") from error
    return model


def score_start(spec: DeviceSpec, initial: ModelParameters | None) -> Counts:
    """How that model does on the test part."""
    test = _load(spec, spec.test_file)
    return evaluate(start_model(spec, initial, tuple(test.inputs.shape[1:])), test, spec.classes)


def train_alone(
    spec: DeviceSpec,
    config: RunConfig,
    initial: ModelParameters | None,
    took_part: Sequence[bool],
    after_round: Callable[[], None] = lambda: None,
) -> list[Counts]:
    """Trains one device without the fleet, from the weights that the fleet starts from.

    Passes over the labels, batch size, optimiser and learning rate of each round are the method's, and so is whether
    the optimiser is kept from round to round. The order of the rows is drawn from the run's seed, as the fleet's is;
    it is that of the fleet's batches only where a method trains in a first step `train` and no round fell short.

    Args:
        spec: The device.
        config: The run, for the method's local training.
        initial: What the method gives every device at the start.
        took_part: For each completed round whether the fleet's device was in it; only then this one trains too.
        after_round: Called after each round.

    Returns:
        Its figures on the test part after each round.
    """
    data, test = _load(spec, spec.data_file), _load(spec, spec.test_file)
    model = start_model(spec, initial, tuple(data.inputs.shape[1:]))
    plan = config.method_config()
    optimizer: torch.optim.Optimizer | None = None
    figures = [evaluate(model, test, spec.classes)]
    for number, active in enumerate(took_part, start=1):
        if number > 1:
            after_round()
        epochs = plan.cross_entropy_epochs(sum(took_part[:number])) if active else 0
        if not epochs:  # not in the round, or in one that makes no pass over the labels
            figures.append(figures[-1])
            continue
        optimizer = _optimizer_in(plan, number, model, optimizer)
        seed = derive_seed(config.run.seed, number, "train", 1, spec.name)
        torch.manual_seed(seed)
        train_epochs(
            model,
            data,
            epochs=epochs,
            batch_size=plan.batch_size,
            optimizer=optimizer,
            loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        figures.append(evaluate(model, test, spec.classes))
    after_round()
    return figures[1:]


def _optimizer_in(
    plan: Any, number: int, model: nn.Module, last: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """The one of last time where the method keeps it, otherwise a new one; with the learning rate of the round."""
    kept = last if plan.keeps_optimizer else None
    optimizer = kept or make_local_optimizer(plan, model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = plan.local_rate(number)
    return optimizer


def _load(spec: DeviceSpec, file: str) -> TensorData:
    return as_tensor_data(load_arrays(file), spec.classes)


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


def note_start(initial: ModelParameters | None, specs: list[DeviceSpec]) -> None:
    """Scores the models that the devices start from: that is what a device has that no round takes.

    Args:
        initial: What the method gives every device at the start.
        specs: The devices.
    """
    for spec in specs:
        append_scores(spec.scores_file, START, score_start(spec, initial).confusion.tolist())
