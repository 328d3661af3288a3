"""The first control of every comparison: the same model, trained alone with the same number of local epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from fleetdistill.local_training import Counts, as_tensor_data, evaluate, make_optimizer, train_epochs
from fleetdistill.model import check_local_model
from fleetdistill.seeds import derive_seed
from fleetdistill_server.engine import initial_extractor
from fleetdistill_server.run_config import RunConfig
from fleetdistill_server.simulation.device import DeviceSpec, build_device_model, load_arrays


@dataclass(frozen=True)
class LocalPlan:
    """How a device trains on its own data in each round of a method."""

    rounds: int
    seed: int
    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, config: Any, *, rounds: int, seed: int) -> LocalPlan:
        """The local part of a method's configuration."""
        return cls(
            rounds=rounds,
            seed=seed,
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )


def train_alone(spec: DeviceSpec, config: RunConfig, plan: LocalPlan) -> list[Counts]:
    """Trains one device without the fleet, from the fleet's initial extractor, in the fleet's batches.

    Returns:
        Its figures on the test part after each round.
    """
    data = as_tensor_data(load_arrays(spec.data_file), spec.classes)
    test = as_tensor_data(load_arrays(spec.test_file), spec.classes)
    model = build_device_model(spec, tuple(data.inputs.shape[1:]))
    check_local_model(model).extractor.load_state_dict(initial_extractor(config).state_dict())
    optimizer = make_optimizer(
        model.parameters(),
        learning_rate=plan.learning_rate,
        momentum=plan.momentum,
        nesterov=plan.momentum > 0,
        weight_decay=plan.weight_decay,
    )
    figures = []
    for number in range(1, plan.rounds + 1):
        seed = derive_seed(plan.seed, number, "train", 1, spec.name)
        torch.manual_seed(seed)
        train_epochs(
            model,
            data,
            epochs=plan.epochs,
            batch_size=plan.batch_size,
            optimizer=optimizer,
            loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        figures.append(evaluate(model, test, spec.classes))
    return figures
