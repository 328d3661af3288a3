"""Runs the local-only control: each device's model, trained on its own data with the method's local training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.compute import top_k_counts
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_lab.simulation.spec.score_log import ALONE, START, append_scores, confusion_of
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig


def start_model(spec: DeviceSpec, initial: ModelParameters | None, input_shape: tuple[int, ...]) -> nn.Module:
    """Builds a device's model with the device's initial weights, overwritten by those that the method distributes.

    Raises:
        ConfigurationError: The method's weights do not fit the device's model.
    """
    model: nn.Module = build_device_model(spec, input_shape)
    if initial is None:
        return model
    try:
        load_parameters(check_local_model(model).extractor if initial.scope == "extractor" else model, initial)
    except ModelError as error:
        text = f"the initial {initial.scope} of the run does not fit model {spec.model!r}: {error}"
        raise ConfigurationError(f"{text}; choose device models with the same {initial.scope}") from error
    return model


def score_initial_model(spec: DeviceSpec, initial: ModelParameters | None, file: str) -> dict[Path, Counts]:
    """Scores a device's initial model on a file of test rows; returns its counts by the log that they belong to."""
    test = _load(spec, file)
    model = start_model(spec, initial, tuple(test.inputs.shape[1:]))
    result = {spec.scores_file: evaluate(model, test, spec.classes)}
    if spec.top_k is not None:
        result[spec.top_k_file] = top_k_counts(model, test, spec.top_k, spec.classes)
    return result


def train_local_only(
    spec: DeviceSpec,
    config: RunConfig,
    initial: ModelParameters | None,
    took_part: Sequence[bool],
    after_round: Callable[[], None] = lambda: None,
) -> list[Counts | None]:
    """Trains one device without the fleet, starting from the same weights as in the fleet.

    Each round uses the method's passes over the labels, batch size, optimiser and learning rate, and keeps the
    optimiser across rounds if the method does. The batch order is drawn from the run's seed. It is the
    fleet's batch order if the method trains in its first step `train` and no round fell short of its quorum.

    Args:
        spec: The device.
        config: The run's configuration, which has the method's local training.
        initial: Initial weights that the method distributes; None if it distributes none.
        took_part: Whether the fleet's device took part in each completed round; here the device trains in the same
            rounds.
        after_round: Called after each round.

    Returns:
        The model's figures on the test set after each round; None for rounds in which the device's models are not
        scored. Those on the device's own rows of the test set, after the last round, are in the score log.
    """
    data = _load(spec, spec.data_file)
    test = _load(spec, spec.test_file) if spec.score_every else None
    model = start_model(spec, initial, tuple(data.inputs.shape[1:])).to(spec.torch_device)
    plan = config.method_config()
    optimizer: torch.optim.Optimizer | None = None
    last: Counts | None = None  # of the present weights
    figures: list[Counts | None] = []
    for number, active in enumerate(took_part, start=1):
        if number > 1:
            after_round()
        epochs = plan.cross_entropy_epochs(sum(took_part[:number])) if active else 0
        if epochs:  # else the device missed the round, or the round makes no pass over the labels
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
                device=spec.torch_device,
            )
            last = None
        if test is None or not (spec.is_scored(number) or number == len(took_part)):
            figures.append(None)
            continue
        last = last or evaluate(model, test, spec.classes)
        figures.append(last)
    after_round()
    if test is not None and spec.own_test_file:
        own = evaluate(model, _load(spec, spec.own_test_file), spec.classes)
        append_scores(spec.scores_file, spec.name, START, own.confusion, ALONE, own=True)
    if test is not None and spec.top_k is not None:
        top = top_k_counts(model, test, spec.top_k, spec.classes).confusion
        append_scores(spec.top_k_file, spec.name, len(took_part), top, ALONE)
    return figures


def _optimizer_in(
    plan: Any, number: int, model: nn.Module, last: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Returns the previous optimiser if the method keeps it, else a new one, with the round's learning rate set."""
    kept = last if plan.keeps_optimizer else None
    optimizer = kept or make_local_optimizer(plan, model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = plan.local_rate(number)
    return optimizer


def _load(spec: DeviceSpec, file: str) -> TensorData:
    return as_tensor_data(load_arrays(file), spec.classes)


def train_fleet_local_only(
    wanted: Simulation,
    config: RunConfig,
    initial: ModelParameters | None,
    specs: Sequence[DeviceSpec],
    history: FleetHistory,
    after_rounds: Callable[[int], None],
) -> dict[str, list[Counts | None]]:
    """Trains every device without the fleet, in the rounds that it took part in, or for `control_rounds`.

    Results are saved per device, so that a resumed simulation does not train again.

    Args:
        wanted: The simulation.
        config: The run's configuration.
        initial: Initial weights that the method distributes; None if it distributes none.
        specs: The simulation's devices.
        history: The fleet's history, which has the rounds that each device took part in.
        after_rounds: Called with the number of rounds that a device has completed since the last call.

    Returns:
        For each device id, the model's figures on the test set after each round, as in `train_local_only`.
    """
    torch.set_num_threads(config.run.threads)
    rounds = wanted.rounds_of_controls

    def active(name: str) -> list[bool]:
        part = [] if wanted.one_exchange else history.took_part[name]
        return [*part, *[True] * (rounds - len(part))][:rounds]

    def counts_of(spec: DeviceSpec) -> list[Counts | None]:
        file = Path(f"{spec.state_dir}-alone.json")
        if file.exists():
            after_rounds(rounds)
            return _load_counts(file)
        result = train_local_only(spec, config, initial, active(spec.name), lambda: after_rounds(1))
        _save_counts(file, result)
        return result

    return {spec.name: counts_of(spec) for spec in specs}


def _save_counts(file: Path, counts: Sequence[Counts | None]) -> None:
    """Saves figures atomically, so that a killed process does not leave a partial file."""
    new = file.with_suffix(".new")
    rows = [
        None if of is None else [of.correct, of.count, of.loss_sum, of.confusion.cells.tolist(), of.confusion.classes]
        for of in counts
    ]
    new.write_text(json.dumps(rows))
    os.replace(new, file)


def _load_counts(file: Path) -> list[Counts | None]:
    def counts_of(correct: int, count: int, loss_sum: float, cells: list[list[int]], classes: int) -> Counts:
        return Counts(correct, count, loss_sum, confusion_of(cells, classes))

    return [None if row is None else counts_of(*row) for row in json.loads(file.read_text())]


def score_initial_models(initial: ModelParameters | None, specs: list[DeviceSpec]) -> None:
    """Scores every device's initial model as round `START`, which applies to devices that no round includes.

    Args:
        initial: Initial weights that the method distributes; None if it distributes none.
        specs: The devices; the score log gets a line for each, and one for its own rows of the test set.
    """
    same = initial is not None and initial.scope == "model"  # then devices with one architecture start equal
    known: dict[tuple[str, str], dict[Path, Counts]] = {}
    for spec in specs:
        key = spec.model, "" if same else spec.name
        if key not in known:
            known = {key: score_initial_model(spec, initial, spec.test_file)} | (known if same else {})
        for file, counts in known[key].items():
            append_scores(file, spec.name, START, counts.confusion)
        if spec.own_test_file:
            own = score_initial_model(spec, initial, spec.own_test_file)[spec.scores_file]
            append_scores(spec.scores_file, spec.name, START, own.confusion, own=True)
