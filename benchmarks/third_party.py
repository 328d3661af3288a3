"""Accuracy of FedAvg, FedProx, MOON, FedPer and FedRep in fleetdistill and in fluke, a public implementation.

    python -m venv /tmp/fluke && /tmp/fluke/bin/pip install fluke-fl==0.8.1
    OMP_NUM_THREADS=1 FLEETDISTILL_DATA=DIR python benchmarks/third_party.py --fluke /tmp/fluke/bin/python

For each seed both have the same rows on each device, the same network and initial weights, the same mini-batch size,
epochs and SGD without momentum, and all devices in each round; the order of the rows differs. The global model is
scored after the last round; of methods without one, each device's model after its last training, on all classes and on
its own (recall of each class, weighted by the device's share of it). The table has mean and standard deviation over
seeds, and the paired difference with the two-sided p value of a t test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEVICES, ROUNDS, EPOCHS, BATCH, RATE, CLASSES, HIDDEN = 20, 20, 3, 32, 0.05, 10, 64
HEAD_EPOCHS = 2
"""Of FedRep's three epochs; the last trains the base."""
MU = {"fedprox": 0.1, "moon": 1.0}
TAU = 0.5
METHODS = ("fedavg", "fedprox", "moon", "fedper", "fedrep")
WITH_GLOBAL = ("fedavg", "fedprox", "moon")
WEIGHTS = ("weight_0", "bias_0", "weight_1", "bias_1")
"""Names of the initial weights in a file, each `[devices, ...]`."""


def network(input_shape: Sequence[int], classes: int = CLASSES) -> nn.Sequential:
    """Builds a network with one hidden layer; the base is all but the last layer."""
    hidden = nn.Linear(int(np.prod(input_shape)), HIDDEN)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(HIDDEN, classes))


# --- fluke; imports it and nothing of fleetdistill


def run_fluke(file: Path, method: str, seed: int) -> dict[str, float]:
    """Runs a method of fluke on the data and the weights of a file."""
    from fluke import DDict, FlukeENV  # type: ignore[import-not-found]
    from fluke.algorithms import CentralizedFL  # type: ignore[import-not-found]
    from fluke.algorithms.fedper import FedPerClient, FedPerServer  # type: ignore[import-not-found]
    from fluke.algorithms.fedprox import FedProxClient  # type: ignore[import-not-found]
    from fluke.algorithms.fedrep import FedRepClient, FedRepServer  # type: ignore[import-not-found]
    from fluke.algorithms.moon import MOONClient  # type: ignore[import-not-found]
    from fluke.client import Client  # type: ignore[import-not-found]
    from fluke.config import OptimizerConfigurator  # type: ignore[import-not-found]
    from fluke.data import FastDataLoader  # type: ignore[import-not-found]
    from fluke.nets import EncoderHeadNet  # type: ignore[import-not-found]
    from fluke.server import Server  # type: ignore[import-not-found]

    kinds: dict[str, tuple[type, type, dict[str, Any]]] = {
        "fedavg": (Client, Server, {}),
        "fedprox": (FedProxClient, Server, {"mu": MU["fedprox"]}),
        "moon": (MOONClient, Server, {"mu": MU["moon"], "tau": TAU}),
        "fedper": (FedPerClient, FedPerServer, {}),
        "fedrep": (FedRepClient, FedRepServer, {"tau": EPOCHS - HEAD_EPOCHS}),
    }
    client_class, server_class, options = kinds[method]
    FlukeENV().set_seed(seed)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    with np.load(file) as kept:
        data = {name: torch.from_numpy(kept[name]) for name in kept.files}

    def started(number: int) -> nn.Module:
        whole = network(data["inputs"].shape[1:])
        for parameter, name in zip(whole.parameters(), WEIGHTS, strict=True):
            parameter.data.copy_(data[name][number])
        result: nn.Module = EncoderHeadNet(whole[:3], whole[3])
        return result

    parts = list(zip(*(data[name].split(data["sizes"].tolist()) for name in ("inputs", "labels")), strict=True))
    clients = []
    for number, (inputs, labels) in enumerate(parts):
        rows = FastDataLoader(inputs, labels, num_labels=CLASSES, batch_size=BATCH, shuffle=True, skip_singleton=False)
        given = {**options, **({} if method in WITH_GLOBAL else {"model": started(number)})}
        clients.append(
            client_class(
                index=number,
                train_set=rows,
                test_set=None,
                optimizer_cfg=OptimizerConfigurator(DDict(name="SGD", lr=RATE)),
                loss_fn=nn.CrossEntropyLoss(),
                local_epochs=HEAD_EPOCHS if method == "fedrep" else EPOCHS,
                **given,
            )
        )
    first: Any = started(0)
    shared = first if method in WITH_GLOBAL else first.encoder
    server = server_class(model=shared, test_set=None, clients=clients, weighted=True)
    algorithm = CentralizedFL(len(clients), None, DDict(), clients=clients, server=server)
    models: list[nn.Module] = []
    algorithm.finalize = lambda: models.extend(
        [server.model] if method in WITH_GLOBAL else [client.model for client in clients]
    )
    algorithm.run(ROUNDS, 1.0)
    tested = [_recalls(one.eval(), data["test_inputs"], data["test_labels"]) for one in models]
    rows_c = torch.bincount(data["test_labels"], minlength=CLASSES).double()
    accuracies = [float((recall_c * rows_c).sum() / rows_c.sum()) for recall_c in tested]
    own = [
        float((recall_c * torch.bincount(labels, minlength=CLASSES)).sum() / len(labels))
        for recall_c, (_, labels) in zip(tested, parts, strict=False)
    ]
    return {"all": statistics.mean(accuracies), **({} if method in WITH_GLOBAL else {"own": statistics.mean(own)})}


@torch.no_grad()
def _recalls(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    hits = model(inputs).argmax(dim=1) == labels
    right_c = torch.bincount(labels, weights=hits.double(), minlength=CLASSES)
    return right_c / torch.bincount(labels, minlength=CLASSES)


# --- fleetdistill


def device_model(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Builds the network, cut below its last layer."""
    from fleetdistill.training.model import split_sequential

    return split_sequential(network(input_shape, classes), 3)


def base(input_shape: Sequence[int]) -> nn.Module:
    """Builds the network below its last layer."""
    return network(input_shape)[:3]


def run_ours(method: str, seed: int, file: Path, dataset: str, alpha: float) -> dict[str, float]:
    """Runs a method of fleetdistill; writes the data and the initial weights to a file for `run_fluke`."""
    from fleetdistill.methods import config_class
    from fleetdistill_lab import Simulation, simulate
    from fleetdistill_lab.simulation.controls.local_only import start_model
    from fleetdistill_lab.simulation.fleet import _prepare, load_data
    from fleetdistill_lab.simulation.spec.arrays import load_arrays
    from fleetdistill_server.engine.contract import build_method

    settings: dict[str, Any] = {
        "robust": "off",
        "local_epochs": EPOCHS,
        "batch_size": BATCH,
        "learning_rate": RATE,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        "mu": MU.get(method),
        "contrast_temperature": TAU,
        "base_epochs": EPOCHS - HEAD_EPOCHS,
    }
    known = config_class(method).__dataclass_fields__
    wanted = Simulation(
        method=method,
        dataset=dataset,
        image_size=14,
        train_limit=4000,
        test_limit=2000,
        devices=DEVICES,
        partition="dirichlet_by_class",
        alpha=alpha,
        rounds=ROUNDS,
        seed=seed,
        models=(device_model,),
        **({} if method in WITH_GLOBAL else {"extractor": base}),
        settings={name: value for name, value in settings.items() if name in known},
        knowledge_type="float32",
        with_alone=False,
        with_fedavg=False,
        score="devices",
        score_every=ROUNDS,
        export="none",
        torch_device="cpu",
        out=file.parent / f"{method}-{seed}",
    )
    first = wanted.out / "first"
    first.mkdir(parents=True)
    prepared = _prepare(wanted, load_data(wanted), first)
    parts = [load_arrays(spec.data_file) for spec in prepared.specs]
    test_inputs, test_labels = load_arrays(prepared.specs[0].test_file)
    initial = build_method(prepared.config).initial()
    models = [start_model(spec, initial, tuple(test_inputs.shape[1:])) for spec in prepared.specs]
    weights = zip(*([w.detach().numpy() for w in model.parameters()] for model in models), strict=True)
    np.savez(
        file,
        inputs=np.concatenate([inputs for inputs, _ in parts]),
        labels=np.concatenate([labels for _, labels in parts]),
        sizes=[len(labels) for _, labels in parts],
        test_inputs=test_inputs,
        test_labels=test_labels,
        **{name: np.stack(of) for name, of in zip(WEIGHTS, weights, strict=True)},
    )
    report = simulate(replace(wanted, out=wanted.out / "run"))
    if method in WITH_GLOBAL:
        return {"all": report.global_accuracy_by_round[-1]}  # type: ignore[dict-item]
    return {"all": report.mean_accuracy_trained, "own": report.mean_own_accuracy_trained}  # type: ignore[dict-item]


# --- the comparison


def main() -> int:
    """Runs both and prints a table; with `--child`, runs fluke and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fluke", help="Python with fluke")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        file, method, seed = given.child
        print(json.dumps(run_fluke(Path(file), method, int(seed))))
        return 0
    print("| method | accuracy on | fleetdistill | fluke | difference | p |\n|---|---|---|---|---|---|")
    for method in given.method or METHODS:
        ours, theirs = [], []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "data.npz"
                ours.append(run_ours(method, seed, file, given.dataset, given.alpha))
                command = [given.fluke, __file__, "--child", str(file), method, str(seed)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
                theirs.append(json.loads(done.stdout.splitlines()[-1]))
        for name in ours[0]:
            print(_row(method, name, [one[name] for one in ours], [one[name] for one in theirs]), flush=True)
    return 0


def _row(method: str, name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    from scipy.stats import ttest_rel

    def told(values: Sequence[float]) -> str:
        return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"

    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    p = ttest_rel(ours, theirs).pvalue
    return f"| {method} | {name} | {told(ours)} | {told(theirs)} | {told(differences)} | {p:.2f} |"


if __name__ == "__main__":
    raise SystemExit(main())
