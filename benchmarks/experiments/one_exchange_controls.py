"""The trained controls of `one_exchange.py`: FedAvg on the same fixed features, and predictors on drawn rows.

Letters: n rows, D numbers a row, C classes, q directions of the class space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from one_exchange_fleet import Fleet, Part, accuracies
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import class_prior
from fleetdistill.seeds import derive_seed

SIZES: tuple[tuple[int, ...], ...] = ((), (32,), (64,), (128,), (128, 64))
"""Hidden layers of the five predictors that devices take in turn."""
LAST_RATE = 0.1
"""Share of the rate that is left in the last step."""
FLOAT_BYTES = 4

Drawn = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Rows of a batch and their labels."""


@dataclass(frozen=True)
class FedAvgSettings:
    """How the network on fixed features is trained; found on seeds 100 to 102 (RESULTS.md).

    Attributes:
        hidden: Width of each hidden layer; none is a linear classifier.
        rounds: Of averaging.
        epochs: Over a device's rows in each round.
        rate: Of the first round; it falls to a tenth.
        batch: Rows of a step.
        weight_decay: Of SGD with Nesterov momentum 0.9.
        scaled: Whether features are centred and scaled with the fleet's moments before.
    """

    hidden: tuple[int, ...] = (128,)
    rounds: int = 30
    epochs: int = 2
    rate: float = 0.05
    batch: int = 32
    weight_decay: float = 5e-4
    scaled: bool = True


@dataclass(frozen=True)
class Curves:
    """Of each round, from the first: the global network, it with devices' priors, and devices after local training.

    Each pair is accuracy on all classes and on own classes.
    """

    global_: list[tuple[float, float]]
    with_prior: list[tuple[float, float]]
    devices: list[tuple[float, float]]
    bytes_a_round: int


def network(inputs: int, hidden: Sequence[int], classes: int, seed: int) -> nn.Sequential:
    """Linear layers with ReLUs between them, from first weights that the seed decides."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def falling(rate: float, step: int, steps: int) -> float:
    """The rate of a step from 0, which falls to a tenth over all steps in a straight line."""
    return rate * (1 - (1 - LAST_RATE) * step / max(steps - 1, 1))


def _sgd(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=weight_decay)


def predict(model: nn.Module, inputs: Tensor) -> Array:
    """Logits in float64."""
    with torch.no_grad():
        return np.asarray(model(inputs).double().numpy())


# --- FedAvg on fixed features


def fedavg(fleet: Fleet, settings: FedAvgSettings) -> Curves:
    """FedAvg of one network on fixed features.

    The moments that scale them would be one further message of 2 D numbers, which is not counted.
    """
    centre, scale = _fleet_scale(fleet.parts) if settings.scaled else (np.zeros(1), np.ones(1))
    inputs = [_tensor((part.features - centre) / scale) for part in fleet.parts]
    labels = [torch.from_numpy(part.labels) for part in fleet.parts]
    unseen = _tensor((fleet.test.features - centre) / scale)
    model = network(fleet.dimensions, settings.hidden, fleet.classes, derive_seed(fleet.seed, "fedavg"))
    weights = torch.tensor([len(label) for label in labels], dtype=torch.float32)
    priors = [np.log(class_prior(part.labels, fleet.classes)) for part in fleet.parts]
    shared = parameters_to_vector(model.parameters()).detach().clone()
    curves = Curves([], [], [], 2 * FLOAT_BYTES * len(shared))
    for number in range(settings.rounds):
        rate, local, answers = falling(settings.rate, number, settings.rounds), [], []
        for device, (rows, classes) in enumerate(zip(inputs, labels, strict=True)):
            vector_to_parameters(shared.clone(), model.parameters())
            seed = derive_seed(fleet.seed, "fedavg", number, device)
            _train_epochs(model, rows, classes, settings, rate, seed)
            local.append(parameters_to_vector(model.parameters()).detach().clone())
            answers.append(predict(model, unseen))
        shared = torch.einsum("k,kp->p", weights / weights.sum(), torch.stack(local))
        vector_to_parameters(shared.clone(), model.parameters())
        result = predict(model, unseen)
        curves.devices.append(accuracies(fleet, answers))
        curves.global_.append(accuracies(fleet, [result] * len(answers)))
        curves.with_prior.append(accuracies(fleet, [log_softmax(result) + prior for prior in priors]))
    return curves


def _train_epochs(
    model: nn.Module, rows: Tensor, labels: Tensor, settings: FedAvgSettings, rate: float, seed: int
) -> None:
    optimizer = _sgd(model, rate, settings.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        for batch in torch.randperm(len(rows), generator=generator).split(settings.batch):
            optimizer.zero_grad()
            cross_entropy(model(rows[batch]), labels[batch]).backward()
            optimizer.step()


def _fleet_scale(parts: Sequence[Part]) -> tuple[Array, Array]:
    together = np.concatenate([part.features for part in parts])
    return together.mean(axis=0), together.std(axis=0) + 1e-9


# --- predictors on own and drawn rows


@dataclass(frozen=True)
class PredictorSettings:
    """How a device's own predictor is trained.

    Attributes:
        steps: At least so many in all.
        epochs: At least so many passes over own rows.
        rate: Falls to a tenth.
        batch: Own rows of a step, and as many drawn ones.
        weight_decay: Of SGD with Nesterov momentum 0.9.
    """

    steps: int = 400
    epochs: int = 30
    rate: float = 0.02
    batch: int = 32
    weight_decay: float = 5e-4


def train_predictor(
    model: nn.Module, rows: Tensor, labels: Tensor, drawn: Drawn, settings: PredictorSettings, seed: int
) -> None:
    """Cross-entropy on own rows plus cross-entropy on drawn rows, in one forward pass."""
    batch = min(settings.batch, len(rows))
    steps = max(settings.steps, settings.epochs * (len(rows) // batch))
    optimizer = _sgd(model, settings.rate, settings.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(rows), generator=generator)
        mine, order = order[:batch], order[batch:]
        others, told = drawn(generator)
        for group in optimizer.param_groups:
            group["lr"] = falling(settings.rate, step, steps)
        optimizer.zero_grad()
        result = model(torch.cat([rows[mine], others]))
        (cross_entropy(result[:batch], labels[mine]) + cross_entropy(result[batch:], told)).backward()
        optimizer.step()


def predictors(
    fleet: Fleet,
    inputs: Sequence[Array],
    unseen: Array,
    drawn: Drawn,
    settings: PredictorSettings | None = None,
    name: str = "predictor",
    sizes_from: int = 0,
) -> list[Array]:
    """General answers `[n, C]` of devices with predictors of five sizes, as logarithms of probabilities.

    Args:
        fleet: The devices.
        inputs: Of each device, what its predictor reads.
        unseen: The test part's.
        drawn: Makes the rows that are drawn for a batch.
        settings: Of the training.
        name: Part of the seeds.
        sizes_from: Which of `SIZES` the first device takes.
    """
    used, answers, tested = settings or PredictorSettings(), [], _tensor(unseen)
    for number, (part, rows) in enumerate(zip(fleet.parts, inputs, strict=True)):
        seed = derive_seed(fleet.seed, name, number)
        model = network(rows.shape[1], SIZES[(sizes_from + number) % len(SIZES)], fleet.classes, seed)
        train_predictor(model, _tensor(rows), torch.from_numpy(part.labels), drawn, used, seed)
        answers.append(log_softmax(predict(model, tested)))
    return answers


def drawn_about(centres_kq: Array, labels: Sequence[int], rows: int = 32) -> Drawn:
    """Rows of classes drawn at random, each its class's centre and standard normal noise: of a class space."""
    centres, known = _tensor(centres_kq), torch.tensor(labels)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(known), (rows,), generator=generator)
        noise = torch.randn(rows, centres.shape[1], generator=generator)
        return centres[at] + noise, known[at]

    return draw


def drawn_from(pools: Mapping[int, Array], rows: int = 32) -> Drawn:
    """Rows of classes drawn at random out of rows that are there already."""
    stacked = _tensor(np.concatenate([pools[label] for label in sorted(pools)]))
    known = torch.from_numpy(np.repeat(sorted(pools), [len(pools[label]) for label in sorted(pools)]))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(known), (rows,), generator=generator)
        return stacked[at], known[at]

    return draw


def with_prior(fleet: Fleet, answers: Sequence[Array]) -> list[Array]:
    """log p + log pi of each device."""
    priors = [np.log(class_prior(part.labels, fleet.classes)) for part in fleet.parts]
    return [found + prior for found, prior in zip(answers, priors, strict=True)]


def at_equal_bytes(fleet: Fleet, settings: FedAvgSettings, budget: float) -> tuple[int, Curves]:
    """FedAvg with as many rounds as the budget allows, its falling rate laid out for them; none is at least one round.

    Args:
        fleet: The devices.
        settings: Of the training; its rounds are not used.
        budget: Bytes of one device up and down.

    Returns:
        Rounds that the budget allows, which can be 0, and the curves of that many rounds or of one.
    """
    model = network(fleet.dimensions, settings.hidden, fleet.classes, 0)
    size = 2 * FLOAT_BYTES * sum(parameter.numel() for parameter in model.parameters())
    rounds = int(budget // size)
    return rounds, fedavg(fleet, replace(settings, rounds=max(rounds, 1)))


def _tensor(rows: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))


def log_softmax(logits: Array) -> Array:
    """Logarithms of probabilities, row by row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
