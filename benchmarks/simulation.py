"""Processor time of simulated rounds against the plain PyTorch loop over the same work.

    python benchmarks/simulation.py                       # every case
    python benchmarks/simulation.py --case "20k CNN" --rounds 30 --profile cnn.pstats

The loop is what a researcher would write by hand: it draws the same devices, trains on the same batches, scores each
trained model and the global one on the test set, and averages. Its weights must equal the simulation's to the bit after
the last round, or the script fails. A round of the loop follows each round of the simulation, so that both run in the
same conditions; a case's figure is the ratio of the medians. Start, delivery and report are not part of a round.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.seeds import derive_seed
from fleetdistill.state.state_file import unpack_state
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.model import split_sequential
from fleetdistill_lab import Simulation
from fleetdistill_lab.simulation.controls.local_only import start_model
from fleetdistill_lab.simulation.fleet import _prepare, load_data
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.progress import Progress, watcher
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.plan import RUN, Fleet
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.cohort import sample_devices
from fleetdistill_server.methods.feddkc.skr import skr
from fleetdistill_server.store.store import Store

WARM_UP = 2
"""Rounds before the first measured one."""


def cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Builds a convolutional network with 20,490 parameters for 28x28 images."""
    layers = [
        *(nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, classes)),
    ]
    return split_sequential(nn.Sequential(*layers), 7)


def tiny(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Builds logistic regression, 650 parameters for 64 inputs."""
    return split_sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)), 1)


@dataclass(frozen=True)
class Case:
    """A simulation to measure.

    Attributes:
        wanted: Its settings, without rounds and folder.
        loop: Makes the plain loop.
        shape: Shape of an input.
        rows: Training rows of all devices together.
    """

    wanted: Simulation
    loop: Callable[[Fleet], FedAvgLoop | FedDKCLoop]
    shape: tuple[int, ...]
    rows: int


_COMMON: dict[str, Any] = {
    "partition": "iid",
    "with_alone": False,
    "with_fedavg": False,
    "torch_device": "cpu",
    "test_limit": 500,
    "score": "devices",
}


def cases() -> dict[str, Case]:
    """Returns all cases by name."""
    tenth = {**_COMMON, "method": "fedavg", "devices": 100, "settings": {"participation_ratio": 0.1, "robust": "off"}}
    return {
        "20k CNN": Case(Simulation(**tenth, models=(cnn,)), FedAvgLoop, (1, 28, 28), 6000),
        "tiniest model": Case(Simulation(**tenth, models=(tiny,)), FedAvgLoop, (1, 8, 8), 3000),
        "FedDKC": Case(
            Simulation(**_COMMON, method="feddkc", devices=10, settings={"robust": "off"}), FedDKCLoop, (1, 8, 8), 1000
        ),
    }


def synthetic(case: Case) -> dict[str, np.ndarray]:
    """Returns learnable classes: a random picture for each, with noise."""
    rng = np.random.default_rng(0)
    centres = rng.random((10, *case.shape), np.float32)

    def part(name: str, rows: int) -> dict[str, np.ndarray]:
        labels = np.arange(rows) % 10
        inputs = centres[labels] + rng.normal(0, 0.5, (rows, *case.shape)).astype(np.float32)
        return {f"{name}_inputs": inputs.astype(np.float32), f"{name}_labels": labels}

    return part("train", case.rows) | part("test", 500)


# --- the plain loops


class _Loop:
    def __init__(self, fleet: Fleet) -> None:
        self.plan, self.seed = fleet.config.method_config(), fleet.config.run.seed
        self.names = [spec.name for spec in fleet.specs]
        self.data = {spec.name: tensors(spec.data_file) for spec in fleet.specs}
        self.test = tensors(fleet.specs[0].test_file)

    def participants(self, number: int) -> list[str]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, number, "participants", "server"))
        return sample_devices(self.names, self.plan.participation_ratio, generator)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], number: int, name: str
    ) -> None:
        inputs, labels = self.data[name]
        seed = derive_seed(self.seed, number, "train", 1, name)
        generator = torch.Generator().manual_seed(seed)
        model.train()
        for _ in range(self.plan.local_epochs):
            for rows in torch.randperm(len(labels), generator=generator).split(self.plan.batch_size):
                optimizer.zero_grad(set_to_none=True)
                loss(model(inputs[rows]), labels[rows], rows).backward()
                optimizer.step()

    def score(self, model: nn.Module) -> float:
        inputs, labels = self.test
        model.eval()
        with torch.no_grad():
            return float((model(inputs).argmax(1) == labels).float().mean())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        plan = self.plan
        options = {"lr": plan.learning_rate, "momentum": plan.momentum, "weight_decay": plan.weight_decay}
        return torch.optim.SGD(model.parameters(), nesterov=plan.nesterov, **options)


class FedAvgLoop(_Loop):
    """McMahan et al.'s algorithm 1 by hand."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.model = build_method(fleet.config).model

    def round(self, number: int) -> None:
        """Trains and averages the round's devices."""
        models, weights = [], []
        for name in self.participants(number):
            model = copy.deepcopy(self.model)
            self.train(model, self.optimizer(model), lambda z, y, rows: functional.cross_entropy(z, y), number, name)
            self.score(model)
            models.append(model.state_dict())
            weights.append(len(self.data[name][1]))
        self.model.load_state_dict({name: _mean([model[name] for model in models], weights) for name in models[0]})
        self.score(self.model)

    def state(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    @staticmethod
    def simulated(state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return state["model"]


def _mean(tensors_k: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(one.double() * weight for one, weight in zip(tensors_k, weights, strict=True))
    return (total / sum(weights)).to(tensors_k[0].dtype)


class FedDKCLoop(_Loop):
    """Wu et al.'s algorithm 1 by hand, with float16 knowledge in both directions."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        method = build_method(fleet.config)
        self.predictor, self.server_optimizer = method.predictor, method.optimizer
        shape = tuple(fleet.data.train_images.shape[1:])
        self.models = {spec.name: start_model(spec, fleet.initial, shape) for spec in fleet.specs}
        self.optimizers = {name: self.optimizer(model) for name, model in self.models.items()}
        self.teachers: dict[str, Tensor] = {}

    def round(self, number: int) -> None:
        """Trains the devices, distils their knowledge into the predictor, and keeps its logits."""
        known = {name: self.upload(number, name) for name in self.names}
        features = torch.cat([item[0] for item in known.values()])
        labels = torch.cat([self.data[name][1] for name in self.names])
        refined = [skr(item[1], self.plan.target_entropy, epsilon=self.plan.epsilon) for item in known.values()]
        targets = torch.cat([item.probabilities for item in refined]).float()
        self.distil(features, labels, targets, number)
        self.predictor.eval()
        with torch.no_grad():
            self.teachers = {name: self.predictor(one[0].float()) for name, one in known.items()}

    def upload(self, number: int, name: str) -> tuple[Tensor, Tensor]:
        model, plan, inputs = self.models[name], self.plan, self.data[name][0]
        teacher = self.teachers.get(name)
        probs = None if teacher is None else soft_targets(teacher.half().float(), plan.temperature)
        valid = torch.ones(len(inputs), dtype=torch.bool)

        def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
            own = functional.cross_entropy(logits, labels)
            if probs is None:
                return own
            return own + plan.beta * distillation_loss(logits, probs[rows], plan.temperature, valid_b=valid[rows])

        self.train(model, self.optimizers[name], loss, number, name)
        self.score(model)
        with torch.no_grad():
            return model.features(inputs).half(), model(inputs).half()

    def distil(self, features: Tensor, labels: Tensor, targets: Tensor, number: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, number, "distil", "server"))
        self.predictor.train()
        for _ in range(self.plan.server_epochs):
            for rows in torch.randperm(len(labels), generator=generator).split(self.plan.batch_size):
                logits = self.predictor(features[rows].float())
                loss = functional.cross_entropy(logits, labels[rows])
                loss = loss + self.plan.server_beta * distillation_loss(logits, targets[rows], self.plan.temperature)
                self.server_optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.server_optimizer.step()

    def state(self) -> Mapping[str, Tensor]:
        return self.predictor.state_dict()

    @staticmethod
    def simulated(state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return state["predictor"]


def tensors(file: str) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of a data file."""
    inputs, labels = load_arrays(file)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


# --- the measurement


@dataclass
class Measured:
    """Processor seconds of each round of both."""

    simulated: list[float] = field(default_factory=list)
    looped: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Returns medians in milliseconds, and their ratio."""
        simulated, looped = (statistics.median(item[WARM_UP:]) for item in (self.simulated, self.looped))
        return {
            "simulated_ms": round(1000 * simulated, 2),
            "loop_ms": round(1000 * looped, 2),
            "ratio": round(simulated / looped, 3),
        }


def measure(case: Case, rounds: int, out: Path, profile: cProfile.Profile | None) -> Measured:
    """Runs a simulation, and a round of the loop after each of its rounds but the last, which also delivers."""
    wanted = replace(case.wanted, dataset=synthetic(case), rounds=rounds + WARM_UP + 1, out=out)
    fleet = _prepare(wanted, load_data(wanted), out)
    loop, measured, since = case.loop(fleet), Measured(), [0.0]

    def after_round(done: Progress) -> None:
        now = time.process_time()
        if done.completed > 1:
            measured.simulated.append(now - since[0])
        if profile is not None:
            profile.disable()
        if done.completed:
            began = time.process_time()
            loop.round(done.completed)
            measured.looped.append(time.process_time() - began)
        if profile is not None and WARM_UP <= done.completed <= rounds + WARM_UP - 1:
            profile.enable()
        since[0] = time.process_time()

    store = run_over_memory(fleet.config, fleet.specs, fleet.work, watcher("fleet", fleet.config, after_round))
    try:
        _check_equal(store, loop)
    finally:
        store.close()
    del measured.simulated[-1:], measured.looped[-1:], measured.looped[:1]
    return measured


def _check_equal(store: Store, loop: FedAvgLoop | FedDKCLoop) -> None:
    simulated = loop.simulated(unpack_state(store.blobs.get_state(store.runs.existing(RUN).checkpoint)))
    for name, tensor in loop.state().items():
        assert torch.equal(tensor, simulated[name]), f"the loop's {name} differs from the simulation's"


def main() -> int:
    """Measures the chosen cases and prints one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(cases()), action="append")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds")
    parser.add_argument("--profile", type=Path, help="file for cProfile's statistics of the measured rounds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.case or cases():
        profile = None if given.profile is None else cProfile.Profile(time.process_time)
        with tempfile.TemporaryDirectory() as folder:
            result = measure(cases()[name], given.rounds, Path(folder), profile)
        if profile is not None:
            profile.dump_stats(given.profile)
        print(json.dumps({"case": name, **result.figures()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
