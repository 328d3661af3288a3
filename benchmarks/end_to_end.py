"""A whole simulation against the plain PyTorch loop that a researcher would write, each in a process of its own.

    python benchmarks/end_to_end.py --data-dir DIR               # every case
    python benchmarks/end_to_end.py --data-dir DIR mnist fleet   # these cases
    python benchmarks/end_to_end.py --only simulation --profile mnist.pstats mnist
    python benchmarks/end_to_end.py --pfl /tmp/pfl/bin/python --flower /tmp/flower/bin/python mnist    # as in peers.py

- mnist: FedAvg on MNIST 28x28, 100 clients, 10 a round, 20 rounds, a network with 20,490 parameters
- fleet: FedAvg on MNIST reduced to 8x8, 10,000 clients with six images each, 200 a round, 3 rounds, a small perceptron
- large: the same with 100,000 clients, for which each image occurs ten times

All read the same files, draw as many clients and train as many batches; the loop, pfl and Flower score the global
model on the test set after each round. The simulation does what `fleetdistill simulate --no-controls` does: it includes
start, store, report and pictures. A figure is the processor time of the whole process and of all that it starts,
imports included, its peak of memory, and the bytes that it leaves on the disk. Flower's Ray has actors and services in
processes of their own, whose processor time is sampled; its peak is that of the first process only. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import descendants, own_seconds

BATCH, LEARNING_RATE = 32, 0.05
WHAT = ("loop", "simulation", "pfl", "flower")


@dataclass(frozen=True)
class Case:
    """A simulation to measure; `size` is the images' side, `model` a function of this file."""

    clients: int
    per_round: int
    rounds: int
    size: int
    model: str
    epochs: int = 1
    copies: int = 1


CASES = {
    "mnist": Case(clients=100, per_round=10, rounds=20, size=28, model="cnn"),
    "fleet": Case(clients=10_000, per_round=200, rounds=3, size=8, model="mlp"),
    "large": Case(clients=100_000, per_round=200, rounds=3, size=8, model="mlp", copies=10),
}


def cnn(input_shape: tuple[int, ...], classes: int) -> Any:
    """Builds the network of `simulation.py`, with 20,490 parameters for 28x28 images."""
    from torch import nn

    from fleetdistill.training.model import split_sequential

    return split_sequential(nn.Sequential(*_cnn_layers(input_shape[0], classes)), 7)


def mlp(input_shape: tuple[int, ...], classes: int) -> Any:
    """Builds a perceptron with 2,410 parameters for 8x8 images."""
    from torch import nn

    from fleetdistill.training.model import split_sequential

    return split_sequential(nn.Sequential(*_mlp_layers(classes)), 3)


def _cnn_layers(channels: int, classes: int) -> list[Any]:
    from torch import nn

    return [
        *(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, classes)),
    ]


def _mlp_layers(classes: int) -> list[Any]:
    from torch import nn

    return [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes)]


def read_mnist(case: Case, data_dir: Path, part: str) -> tuple[Any, Any]:
    """Returns the images `[N, 1, size, size]` in [0, 1] and the labels of `train` or `test`."""
    import numpy as np
    import torch
    from torch.nn import functional

    with np.load(data_dir / "mnist" / "mnist.npz") as file:
        inputs, labels = file[f"{part}_images"], file[f"{part}_labels"]
    images = torch.from_numpy(inputs).reshape(-1, 1, 28, 28).float().div_(255)
    if case.size != 28:
        images = functional.interpolate(images, size=(case.size, case.size), mode="area")
    copies = case.copies if part == "train" else 1
    return images.repeat(copies, 1, 1, 1) if copies > 1 else images, torch.from_numpy(labels).long().repeat(copies)


def layers_of(case: Case) -> Any:
    """Builds the case's network without anything of fleetdistill."""
    from torch import nn

    return nn.Sequential(*(_cnn_layers(1, 10) if case.model == "cnn" else _mlp_layers(10)))


def accuracy_of(model: Any, images: Any, labels: Any) -> float:
    """Returns the accuracy of a network on the test set, in batches of 1,024 rows."""
    import torch

    with torch.no_grad():
        parts = zip(images.split(1024), labels.split(1024), strict=True)
        return sum(int((model(rows).argmax(1) == truth).sum()) for rows, truth in parts) / len(labels)


def clients_of(case: Case, rows: int) -> list[Any]:
    """Returns each client's rows, drawn at random."""
    import numpy as np

    return np.array_split(np.random.default_rng(0).permutation(rows), case.clients)


def run_loop(case: Case, data_dir: Path) -> dict[str, Any]:
    """Runs federated averaging by hand; returns the accuracy after the last round."""
    import numpy as np
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    (inputs, labels), (test_inputs, test_labels) = (read_mnist(case, data_dir, part) for part in ("train", "test"))
    parts = clients_of(case, len(labels))
    model, local = layers_of(case), layers_of(case)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accuracies = []
    for _ in range(case.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        drawn = rng.choice(case.clients, case.per_round, replace=False)
        rows = sum(len(parts[client]) for client in drawn)
        for client in drawn:
            local.load_state_dict(state)
            optimizer = torch.optim.SGD(local.parameters(), lr=LEARNING_RATE)
            own_inputs, own_labels = inputs[parts[client]], labels[parts[client]]
            for _ in range(case.epochs):
                for batch in torch.randperm(len(own_labels)).split(BATCH):
                    optimizer.zero_grad(set_to_none=True)
                    functional.cross_entropy(local(own_inputs[batch]), own_labels[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                for name, tensor in local.state_dict().items():
                    total[name] += tensor * (len(own_labels) / rows)
        state = total
        model.load_state_dict(state)
        accuracies.append(accuracy_of(model, test_inputs, test_labels))
    return {"accuracy": accuracies[-1]}


def run_pfl(case: Case, data_dir: Path) -> dict[str, Any]:
    """Runs FedAvg in pfl-research; returns the accuracy after the last round."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional

    torch.set_num_threads(1)
    (inputs, labels), test = (read_mnist(case, data_dir, part) for part in ("train", "test"))
    parts = clients_of(case, len(labels))
    accuracies = []

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers_of(case)

        def forward(self, images: Any) -> Any:
            return self.layers(images)

        def loss(self, images: Any, truth: Any) -> Any:
            return functional.cross_entropy(self(images), truth)

        def metrics(self, images: Any, truth: Any) -> dict[str, Any]:
            return {}

    class AfterRound(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            model.pytorch_model.eval()
            accuracies.append(accuracy_of(model.pytorch_model, *test))
            model.pytorch_model.train()
            return False, Metrics()

    data = {number: [inputs[rows], labels[rows]] for number, rows in enumerate(parts)}
    sampler = get_user_sampler("random", list(data))
    backend = SimulatedBackend(training_data=FederatedDataset.from_slices(data, sampler), val_data=None)
    network = Network()
    model = PyTorchModel(
        network, lambda weights, lr: torch.optim.SGD(weights, lr=lr), torch.optim.SGD(network.parameters(), 1.0)
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=case.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=case.per_round,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=case.epochs, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        callbacks=[AfterRound()],
    )
    return {"accuracy": accuracies[-1]}


def run_flower(case: Case, data_dir: Path) -> dict[str, Any]:
    """Runs FedAvg in Flower, with Ray actors as its simulation does; returns the accuracy after the last round."""
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, accuracies = ClientApp(), ServerApp(), []
    name = next(name for name, known in CASES.items() if known == case)

    @client.train()
    def train_client(message: Message, context: Context) -> Message:
        import end_to_end  # the module, not a copy that Ray has made, so that an actor reads the files once

        inputs, labels = end_to_end.client_rows(name, data_dir)[int(context.node_config["partition-id"])]
        model = layers_of(case)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(case.epochs):
            for batch in torch.randperm(len(labels)).split(BATCH):
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model, test = layers_of(case), read_mnist(case, data_dir, "test")

        def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
            if number:
                model.load_state_dict(arrays.to_torch_state_dict())
                accuracies.append(accuracy_of(model, *test))
            return MetricRecord({"accuracy": accuracies[-1] if accuracies else 0.0})

        fractions = {"fraction_train": case.per_round / case.clients, "fraction_evaluate": 0.0}
        strategy = FedAvg(**fractions, min_available_nodes=case.clients)
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=case.rounds, evaluate_fn=after_round)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=case.clients, backend_config=resources)
    return {"accuracy": accuracies[-1]}


@functools.cache
def client_rows(name: str, data_dir: Path) -> list[tuple[Any, Any]]:
    """Returns the rows of each client of a case, read once in a process."""
    inputs, labels = read_mnist(CASES[name], data_dir, "train")
    return [(inputs[rows], labels[rows]) for rows in clients_of(CASES[name], len(labels))]


def run_simulation(case: Case, data_dir: Path, settings: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Runs the simulation, as `fleetdistill simulate --no-controls` does; returns the global accuracy at its end."""
    import cProfile

    from fleetdistill_lab import Simulation, simulate

    profiler = cProfile.Profile(time.process_time) if profile else None
    with tempfile.TemporaryDirectory() as folder:
        wanted = Simulation(
            method="fedavg",
            settings={
                "batch_size": BATCH,
                "learning_rate": LEARNING_RATE,
                "local_epochs": case.epochs,
                "momentum": 0.0,
                "robust": "off",
            },
            **_data(case, data_dir),
            devices=case.clients,
            devices_per_round=case.per_round,
            rounds=case.rounds,
            models=(f"end_to_end:{case.model}",),
            partition="iid",
            with_alone=False,
            with_fedavg=False,
            torch_device="cpu",
            out=Path(folder) / "out",
            **settings,
        )
        if profiler is not None:
            profiler.enable()
        report = simulate(wanted)
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(profile)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {"accuracy": report.global_accuracy_by_round[-1], "disk_mb": round(size / 1e6, 1)}


def _data(case: Case, data_dir: Path) -> dict[str, Any]:
    if case.copies == 1:
        return {"dataset": "mnist", "data_dir": data_dir, "image_size": case.size}
    arrays = {}
    for part in ("train", "test"):
        inputs, labels = read_mnist(case, data_dir, part)
        arrays |= {f"{part}_inputs": inputs.numpy(), f"{part}_labels": labels.numpy()}
    return {"dataset": arrays}


def measure(
    name: str, what: str, data_dir: Path, settings: Mapping[str, Any], profile: str, python: str
) -> dict[str, Any]:
    """Runs the loop, the simulation or another framework in a process of its own; returns its figures."""
    command = [python, __file__, "--data-dir", str(data_dir), "--inside", what, "--settings"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path() if python == sys.executable else ""}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = [*command, json.dumps(settings), "--profile", profile, name]
    seconds_of: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(arguments, stdout=output, env=env) as process:
            while process.poll() is None:
                for pid in (process.pid, *descendants(process.pid)):
                    seconds_of[pid] = max(seconds_of.get(pid, 0.0), own_seconds(pid))
                time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{what} ended with the status {process.returncode}")
        output.seek(0)
        lines = output.read().splitlines()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if what == "flower":  # nobody waits for Ray's services and actors, so that the system's sum lacks them
        seconds = max(seconds, sum(seconds_of.values()))
    figures = {"seconds": round(seconds, 1), "wall": round(time.monotonic() - began, 1)}
    return {**figures, **json.loads(lines[-1])}


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parent), *sys.path])


def main() -> int:
    """Measures the chosen cases and prints one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FLEETDISTILL_DATA"))
    parser.add_argument("--only", choices=WHAT)
    parser.add_argument("--pfl", help="Python of an environment with pfl, to run it too")
    parser.add_argument("--flower", help="Python of an environment with Flower, to run it too")
    parser.add_argument("--settings", type=json.loads, default={}, help="further settings of the simulation, as JSON")
    parser.add_argument("--profile", default="", help="file for cProfile's statistics of the simulation")
    parser.add_argument("--inside", choices=WHAT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        case, data = CASES[options.case[0]], Path(options.data_dir)
        if options.inside == "simulation":
            figures = run_simulation(case, data, options.settings, options.profile)
        else:
            figures = {"loop": run_loop, "pfl": run_pfl, "flower": run_flower}[options.inside](case, data)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({**figures, "peak_mb": round(peak)}))
        return 0
    for name in options.case or CASES:
        line: dict[str, Any] = {"case": name, "load": round(os.getloadavg()[0], 2)}
        pythons = {"loop": sys.executable, "simulation": sys.executable, "pfl": options.pfl, "flower": options.flower}
        for what in [options.only] if options.only else [what for what in WHAT if pythons[what]]:
            of_what = (options.settings, options.profile, pythons[what])
            line[what] = measure(name, what, Path(options.data_dir).resolve(), *of_what)
        for what in line.keys() & set(WHAT[1:]) if "loop" in line else ():
            line[what]["ratio"] = round(line[what]["seconds"] / line["loop"]["seconds"], 2)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
