"""The first control of every comparison: the same model, trained alone with the local training of the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.simulation.spec.device import DeviceSpec, build_device_model, load_arrays


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
        text = f"the {initial.scope} that the run hands out does not fit {spec.name}'s model {spec.model!r}: {error}"
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
