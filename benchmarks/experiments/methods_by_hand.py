"""FedAvg, FedProx, MOON, FedPer and FedRep as loops in plain PyTorch, beside the product on the same partitions.

    python benchmarks/experiments/methods_by_hand.py

Digits, ten devices (Dirichlet, alpha 0.5), a network of two hidden layers, ten rounds of five epochs of SGD. The
loops have the product's data and partitions; initial weights, order of the rows and all formulas are their own. These
are no published settings or numbers. Takes about three minutes on an idle core.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill_lab.experiments.networks import mnist_2nn
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.data.partition import partition
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation

DEVICES, ALPHA, ROUNDS, EPOCHS, BATCH, RATE = 10, 0.5, 10, 5, 32, 0.05
MU = {"fedprox": 1.0, "moon": 5.0}
TAU, BASE_EPOCHS = 0.5, 1
LATE = 5
METHODS = ("fedavg", "fedprox", "moon", "fedper", "fedrep")
PERSONAL = ("fedper", "fedrep")
Loss = Callable[[nn.Sequential, Tensor, Tensor], Tensor]


def base(input_shape: tuple[int, ...]) -> nn.Module:
    """The product's extractor: what FedPer and FedRep share."""
    return mnist_2nn(input_shape, 10).extractor


def by_product(method: str, seed: int) -> tuple[float, float]:
    """Returns the accuracy of the global model in the last rounds, or of personal models on own classes, and of all
    device models on all classes, after the last local training."""
    settings: dict[str, Any] = {
        "local_epochs": EPOCHS,
        "batch_size": BATCH,
        "learning_rate": RATE,
        "momentum": 0.0,
        "nesterov": False,
    }
    settings |= {"weight_decay": 0.0, "robust": "off", **({"mu": MU[method]} if method in MU else {})}
    with tempfile.TemporaryDirectory() as folder:
        report = simulate(
            Simulation(
                method=method,
                out=Path(folder) / "run",
                dataset="digits",
                devices=DEVICES,
                partition="dirichlet_by_class",
                alpha=ALPHA,
                rounds=ROUNDS,
                score_every=1,
                seed=seed,
                models=("fleetdistill_lab.experiments.networks:mnist_2nn",),
                extractor="methods_by_hand:base" if method in PERSONAL else "",
                settings=settings,
                with_alone=False,
                with_fedavg=False,
                export="none",
            )
        )
    of_global = [rate for rate in report.global_accuracy_by_round[-LATE:] if rate is not None]
    first = report.mean_own_accuracy_trained if method in PERSONAL else statistics.mean(of_global)
    assert first is not None
    assert report.mean_accuracy_trained is not None
    return first, report.mean_accuracy_trained


def make_network() -> nn.Sequential:
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(200, 10))


def train(
    network: nn.Sequential, weights: list[nn.Parameter], images: Tensor, labels: Tensor, epochs: int, loss: Loss
) -> None:
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            gradients = torch.autograd.grad(loss(network, images[rows], labels[rows]), weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(RATE * gradient)


def cross_entropy(network: nn.Sequential, images: Tensor, labels: Tensor) -> Tensor:
    return -functional.log_softmax(network(images), dim=1)[torch.arange(len(labels)), labels].mean()


def with_proximal_term(start: nn.Sequential) -> Loss:
    """FedProx, Li et al. 2020: + mu / 2 ||w - w_t||^2."""

    def loss(network: nn.Sequential, images: Tensor, labels: Tensor) -> Tensor:
        pairs = zip(network.parameters(), start.parameters(), strict=True)
        distance = torch.stack([(w - w_t.detach()).pow(2).sum() for w, w_t in pairs]).sum()
        return cross_entropy(network, images, labels) + MU["fedprox"] / 2 * distance

    return loss


def with_contrast(start: nn.Sequential, last: nn.Sequential) -> Loss:
    """MOON, Li et al. 2021: - mu log(e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau))), cosines with both models' z."""

    def loss(network: nn.Sequential, images: Tensor, labels: Tensor) -> Tensor:
        z, z_glob, z_prev = (one[:-1](images) for one in (network, start, last))
        others = [other.detach() for other in (z_glob, z_prev)]
        near, far = ((z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1) for other in others)
        term: Tensor = -((near / TAU).exp() / ((near / TAU).exp() + (far / TAU).exp())).log().mean()
        return cross_entropy(network, images, labels) + term * MU["moon"]

    return loss


def by_hand(method: str, seed: int) -> tuple[float, float]:
    """Returns the same two accuracies of the loop; a class counts as often as the device has it."""
    data = load_dataset("digits")
    split = partition("dirichlet_by_class", data.train_labels.numpy(), DEVICES, seed, alpha=ALPHA)
    parts = [torch.as_tensor(rows) for rows in split.indices]
    torch.manual_seed(seed)
    mean, networks = make_network(), [make_network() for _ in range(DEVICES)]
    last: list[nn.Sequential | None] = [None] * DEVICES
    shared = [name for name in mean.state_dict() if method not in PERSONAL or name.startswith("1.")]  # the first layer
    of_global = list[float]()
    for _ in range(ROUNDS):
        for number, (network, rows) in enumerate(zip(networks, parts, strict=True)):
            network.load_state_dict({name: mean.state_dict()[name] for name in shared}, strict=False)
            images, labels, weights = data.train_images[rows], data.train_labels[rows], list(network.parameters())
            if method == "fedrep":
                train(network, weights[2:], images, labels, EPOCHS - BASE_EPOCHS, cross_entropy)
                train(network, weights[:2], images, labels, BASE_EPOCHS, cross_entropy)
                continue
            start = copy.deepcopy(network)
            losses = {"fedprox": with_proximal_term(start), "moon": with_contrast(start, last[number] or start)}
            train(network, weights, images, labels, EPOCHS, losses.get(method, cross_entropy))
            last[number] = copy.deepcopy(network)
        shares = [len(rows) / sum(map(len, parts)) for rows in parts]
        with torch.no_grad():
            for name in shared:
                pairs = zip(shares, networks, strict=True)
                mean.state_dict()[name].copy_(
                    torch.stack([share * one.state_dict()[name] for share, one in pairs]).sum(0)
                )
        of_global.append(float(right(mean, data.test_images, data.test_labels).mean()))
    of_devices = [right(network, data.test_images, data.test_labels) for network in networks]
    by_class = [[float(one[data.test_labels == c].mean()) for c in range(10)] for one in of_devices]
    of_own = statistics.mean(
        float((torch.tensor(rates)[data.train_labels[rows]]).mean())
        for rates, rows in zip(by_class, parts, strict=True)
    )
    first = of_own if method in PERSONAL else statistics.mean(of_global[-LATE:])
    return first, statistics.mean(float(one.mean()) for one in of_devices)


def right(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        predicted: Tensor = network(images).argmax(1)
    return (predicted == labels).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for method in METHODS:
        runs = [(by_product(method, seed), by_hand(method, seed)) for seed in range(given.seeds)]
        first = "devices, own classes" if method in PERSONAL else f"global model, last {LATE} rounds"
        for at, what in enumerate((first, "devices, all classes")):
            both = [[100 * run[who][at] for run in runs] for who in (0, 1)]
            shown = [f"{statistics.mean(of):.1f} ± {statistics.stdev(of):.1f}" for of in both]
            leads = [one - other for one, other in zip(*both, strict=True)]
            paired = ", ".join(f"{lead:+.1f}" for lead in leads)
            print(f"{method}: {what}: {shown[0]} the product, {shown[1]} by hand, by seed {paired}", flush=True)


if __name__ == "__main__":
    main()
