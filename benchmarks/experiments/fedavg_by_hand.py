"""FedAvg as a loop in plain PyTorch: what `fleetdistill experiment run fedavg-table-1` is compared with.

    FLEETDISTILL_DATA=data python benchmarks/experiments/fedavg_by_hand.py --rounds 800

MNIST 2NN of McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data: 100 devices
with 600 images, of which ten train in each round for one epoch with batches of 10 and SGD with a rate of 0.1. The
partition, the draws and the weights are the loop's own. Prints the first round whose test accuracy is 97 %.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

from fleetdistill_lab.simulation.data.datasets import load_dataset

DEVICES, DRAWN, BATCH, RATE, TARGET = 100, 10, 10, 0.1, 0.97


def rows_of_devices(labels: np.ndarray, generator: np.random.Generator, iid: bool) -> list[np.ndarray]:
    """Random rows, or two of 200 pieces of the rows sorted by class."""
    rows = generator.permutation(len(labels))
    if iid:
        return np.array_split(rows, DEVICES)
    pieces = np.array_split(rows[np.argsort(labels[rows], kind="stable")], 2 * DEVICES)
    order = generator.permutation(2 * DEVICES).reshape(DEVICES, 2)
    return [np.concatenate([pieces[number] for number in mine]) for mine in order]


def rounds_to_target(seed: int, rounds: int, iid: bool) -> str:
    data = load_dataset("mnist")
    images, labels = data.train_images, data.train_labels
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    parts = rows_of_devices(labels.numpy(), generator, iid)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    best = 0.0
    for number in range(1, rounds + 1):
        sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        for device in generator.choice(DEVICES, DRAWN, replace=False):
            network.load_state_dict(weights)
            optimizer = torch.optim.SGD(network.parameters(), RATE)
            for batch in torch.as_tensor(generator.permutation(parts[device])).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
                optimizer.step()
            for name, value in network.state_dict().items():
                sums[name] += value / DRAWN  # all have 600 rows
        weights = sums
        network.load_state_dict(weights)
        with torch.no_grad():
            predicted = network(data.test_images).argmax(dim=1)
        accuracy = float((predicted == data.test_labels).float().mean())
        best = max(best, accuracy)
        if accuracy >= TARGET:
            return f"{number} rounds"
    return f"never in {rounds} rounds; best round {best:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for iid in (True, False):
        for seed in range(given.seeds):
            print(
                f"{'IID' if iid else 'non-IID'}, seed {seed}: {rounds_to_target(seed, given.rounds, iid)}", flush=True
            )


if __name__ == "__main__":
    main()
