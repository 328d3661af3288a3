"""Processor time of a FedAvg round in fleetdistill, pfl and Flower, each against the plain loop over the same work.

    python -m venv /tmp/pfl && /tmp/pfl/bin/pip install 'pfl[pytorch]'
    python -m venv /tmp/flower && /tmp/flower/bin/pip install 'flwr[simulation]' torch
    OMP_NUM_THREADS=1 python benchmarks/peers.py --pfl /tmp/pfl/bin/python --flower /tmp/flower/bin/python

100 clients with 60 rows each, of which a round trains ten: a convolutional network with 20,338 parameters, two epochs,
batches of 32, SGD with Nesterov momentum. Every trained model and the global one are scored on 500 rows. Each framework
runs in a process of its own, in turn. After each of its rounds the process runs a round of a plain loop, which is not
part of the framework's round; the figure of a process is the ratio of the medians. The processor time is that of the
process and all that it has started, such as Ray's actors. Start and end are not measured.

pfl does not shuffle a client's rows; it has the same number of batches of the same sizes. In all frameworks the clients
of a round are drawn at random. Install the same version of torch everywhere. Linux only.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, PER_ROUND, ROWS, TEST_ROWS, CLASSES = 100, 10, 60, 500, 10
EPOCHS, BATCH, RATE, MOMENTUM = 2, 32, 0.02, 0.9
WARM_UP = 2
"""Rounds before the first measured one."""


class Network(nn.Module):
    """A convolutional network with 20,338 parameters; `loss` and `metrics` are what pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, CLASSES)),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return {}


def part(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns learnable classes: a random picture for each, with noise."""
    centres = np.random.default_rng(0).random((CLASSES, 1, 28, 28), np.float32)
    labels = np.arange(rows) % CLASSES
    noise = np.random.default_rng(seed).normal(0, 0.5, (rows, 1, 28, 28))
    return torch.from_numpy((centres[labels] + noise).astype(np.float32)), torch.from_numpy(labels)


def client_data(number: int) -> tuple[Tensor, Tensor]:
    return part(number + 1, ROWS)


def test_data() -> tuple[Tensor, Tensor]:
    return part(1_000_000, TEST_ROWS)


def optimizer_of(model: nn.Module, lr: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM, nesterov=True)


def train(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """Trains a client's model."""
    inputs, labels = data
    optimizer = optimizer_of(model)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def score(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Returns a model's accuracy."""
    model.eval()
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


class Loop:
    """FedAvg as a researcher would write it by hand."""

    def __init__(self) -> None:
        self.model, self.test = Network(), test_data()
        self.data = [client_data(number) for number in range(CLIENTS)]

    def round(self) -> None:
        """Trains, scores and averages ten clients."""
        models = []
        for number in torch.randperm(CLIENTS)[:PER_ROUND].tolist():
            model = copy.deepcopy(self.model)
            train(model, self.data[number])
            score(model, self.test)
            models.append(model.state_dict())
        mean = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}
        self.model.load_state_dict(mean)
        score(self.model, self.test)


# --- the measurement in a process


def tree_seconds() -> float:
    """Returns the processor time so far of this process and all that it has started."""
    return time.process_time() + sum(_seconds(pid, 15) for pid in descendants(os.getpid()))


def descendants(pid: int) -> Iterator[int]:
    """Returns the processes that a process has started, and those that these have started."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for item in path.read_text().split():
            yield int(item)
            yield from descendants(int(item))


def own_seconds(pid: int) -> float:
    """Returns the processor time so far of one process; 0 if it has ended."""
    return _seconds(pid, 13)


def _seconds(pid: int, end: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(int(field) for field in fields[11:end]) / os.sysconf("SC_CLK_TCK")


class Rounds:
    """Processor seconds of a framework's rounds, and of a loop's round after each."""

    def __init__(self) -> None:
        self.loop, self.framework, self.plain = Loop(), [0.0], [0.0]
        self._since = tree_seconds()

    def ended(self) -> None:
        """Called after each round of the framework."""
        now = tree_seconds()
        self.framework.append(now - self._since)
        began = time.process_time()
        self.loop.round()
        self.plain.append(time.process_time() - began)
        self._since = tree_seconds()

    def ratio(self) -> float:
        """Returns the ratio of the medians."""
        return statistics.median(self.framework[1 + WARM_UP :]) / statistics.median(self.plain[1 + WARM_UP :])


# --- the frameworks


def run_pfl(rounds: int) -> float:
    """Runs FedAvg in pfl."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    test, measured = test_data(), Rounds()

    class Scoring(FederatedAveraging):
        def train_one_user(self, initial: Any, model: Any, user_dataset: Any, central_context: Any) -> Any:
            result = super().train_one_user(initial, model, user_dataset, central_context)
            score(model.pytorch_model, test)
            model.pytorch_model.train()
            return result

    class AfterRound(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            score(model.pytorch_model, test)
            measured.ended()
            return False, Metrics()

    data = {number: list(client_data(number)) for number in range(CLIENTS)}
    sampler = get_user_sampler("minimize_reuse", list(data))
    backend = SimulatedBackend(training_data=FederatedDataset.from_slices(data, sampler), val_data=None)
    network = Network()
    model = PyTorchModel(network, optimizer_with_rate, torch.optim.SGD(network.parameters(), 1.0))
    Scoring().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=PER_ROUND, val_cohort_size=0
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=EPOCHS, local_learning_rate=RATE, local_batch_size=BATCH
        ),
        callbacks=[AfterRound()],
    )
    return measured.ratio()


def optimizer_with_rate(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, nesterov=True)


def run_flower(rounds: int) -> float:
    """Runs FedAvg in Flower, with Ray actors as its simulation does."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, result = ClientApp(), ServerApp(), []

    @client.train()
    def train_client(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = Network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, client_data(int(context.node_config["partition-id"])))
        figures = {"num-examples": ROWS, "accuracy": score(model, test_data())}
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(figures)}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model, test, measured = Network(), test_data(), Rounds()

        def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = score(model, test)
            if number:
                measured.ended()
            return MetricRecord({"accuracy": accuracy})

        strategy = FedAvg(fraction_train=PER_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, evaluate_fn=after_round)
        result.append(measured.ratio())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)
    return result[0]


def run_fleetdistill(rounds: int) -> float:
    """Runs FedAvg in fleetdistill; the loop is that of `simulation.py`, which has the same weights to the bit."""
    import tempfile

    from simulation import cases, measure

    with tempfile.TemporaryDirectory() as folder:
        result = measure(cases()["20k CNN"], rounds - WARM_UP, Path(folder), None)
    return result.figures()["ratio"]


FRAMEWORKS: dict[str, Callable[[int], float]] = {
    "fleetdistill": run_fleetdistill,
    "pfl": run_pfl,
    "flower": run_flower,
}


def main() -> int:
    """Measures the frameworks in turn, or is the process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfl", help="Python of an environment with pfl")
    parser.add_argument("--flower", help="Python of an environment with Flower")
    parser.add_argument(
        "--rounds", type=int, default=22, help="rounds of a process, of which the first two do not count"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        torch.set_num_threads(1)
        print(json.dumps(FRAMEWORKS[given.only](given.rounds)), flush=True)
        return 0
    pythons = {"fleetdistill": sys.executable, "pfl": given.pfl, "flower": given.flower}
    result: dict[str, list[float]] = {name: [] for name, python in pythons.items() if python}
    for _ in range(given.turns):
        for name, ratios in result.items():
            ratios.append(_in_own_process(str(pythons[name]), name, given.rounds))
            print(f"{name}: {ratios[-1]:.2f}", flush=True)
    for name, ratios in result.items():
        print(f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} turns)")
    return 0


def _in_own_process(python: str, name: str, rounds: int) -> float:
    command = [python, __file__, "--only", name, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
