"""The first control of every comparison: the same model, trained alone with the same number of local epochs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from fleetdistill.knowledge import ModelParameters
from fleetdistill.local_training import Counts, TensorData, as_tensor_data, evaluate, train_epochs
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.model import check_local_model
from fleetdistill.seeds import derive_seed
from fleetdistill.tensors import load_parameters
from fleetdistill_server.run_config import RunConfig
from fleetdistill_server.simulation.device import DeviceSpec, build_device_model, load_arrays


def start_model(spec: DeviceSpec, initial: ModelParameters | None, input_shape: tuple[int, ...]) -> nn.Module:
    """The model that a device starts from: its own first weights, and over them what the method gives every device."""
    model: nn.Module = build_device_model(spec, input_shape)
    if initial is not None:
        load_parameters(check_local_model(model).extractor if initial.scope == "extractor" else model, initial)
    return model


def score_start(spec: DeviceSpec, initial: ModelParameters | None) -> Counts:
    """How that model does on the test part."""
    test = _load(spec, spec.test_file)
    return evaluate(start_model(spec, initial, tuple(test.inputs.shape[1:])), test, spec.classes)


def train_alone(
    spec: DeviceSpec, config: RunConfig, initial: ModelParameters | None, took_part: Sequence[bool]
) -> list[Counts]:
    """Trains one device without the fleet, from the weights that the fleet starts from, in the fleet's batches.

    Args:
        spec: The device.
        config: The run, for the method's local training.
        initial: What the method gives every device at the start.
        took_part: For each completed round whether the fleet's device was in it; only then this one trains too.

    Returns:
        Its figures on the test part after each round.
    """
    data, test = _load(spec, spec.data_file), _load(spec, spec.test_file)
    model = start_model(spec, initial, tuple(data.inputs.shape[1:]))
    plan = config.method_config()
    optimizer = make_local_optimizer(plan, model.parameters())
    figures = [evaluate(model, test, spec.classes)]
    for number, active in enumerate(took_part, start=1):
        if not active:
            figures.append(figures[-1])
            continue
        seed = derive_seed(config.run.seed, number, "train", 1, spec.name)
        torch.manual_seed(seed)
        train_epochs(
            model,
            data,
            epochs=plan.cross_entropy_epochs(sum(took_part[:number])),
            batch_size=plan.batch_size,
            optimizer=optimizer,
            loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        figures.append(evaluate(model, test, spec.classes))
    return figures[1:]


def _load(spec: DeviceSpec, file: str) -> TensorData:
    return as_tensor_data(load_arrays(file), spec.classes)
