"""The first control of every comparison: the same model, trained alone with the same number of local epochs."""

from __future__ import annotations

import torch
from torch.nn import functional

from fleetdistill.knowledge import ModelParameters
from fleetdistill.local_training import Counts, as_tensor_data, evaluate, train_epochs
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.model import check_local_model
from fleetdistill.seeds import derive_seed
from fleetdistill.tensors import load_parameters
from fleetdistill_server.run_config import RunConfig
from fleetdistill_server.simulation.device import DeviceSpec, build_device_model, load_arrays


def train_alone(spec: DeviceSpec, config: RunConfig, initial: ModelParameters | None) -> list[Counts]:
    """Trains one device without the fleet, from the weights that the fleet starts from, in the fleet's batches.

    Args:
        spec: The device.
        config: The run, for the method's local training.
        initial: What the method gives every device at the start.

    Returns:
        Its figures on the test part after each round.
    """
    data = as_tensor_data(load_arrays(spec.data_file), spec.classes)
    test = as_tensor_data(load_arrays(spec.test_file), spec.classes)
    model = build_device_model(spec, tuple(data.inputs.shape[1:]))
    if initial is not None:
        load_parameters(check_local_model(model).extractor if initial.scope == "extractor" else model, initial)
    plan = config.method_config()
    optimizer = make_local_optimizer(plan, model.parameters())
    figures = []
    for number in range(1, config.run.rounds + 1):
        seed = derive_seed(config.run.seed, number, "train", 1, spec.name)
        torch.manual_seed(seed)
        train_epochs(
            model,
            data,
            epochs=plan.cross_entropy_epochs(number),
            batch_size=plan.batch_size,
            optimizer=optimizer,
            loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        figures.append(evaluate(model, test, spec.classes))
    return figures
