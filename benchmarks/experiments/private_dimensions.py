"""Accuracy of private class statistics by the number of whitened features: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=... python benchmarks/experiments/private_dimensions.py fashion-mnist mnist
    FLEETDISTILL_DATA=... python benchmarks/experiments/private_dimensions.py --strengths fashion-mnist mnist digits

Extractor, sums, merge and closed form are the product's; the noise is drawn as floats with the variance of exact noise.
Local: every device adds noise of its own. Sum: only the devices' sum is seen, with one noise whose variance is n / m
times a device's; of n devices each adds 1 / m of it, so that m = floor(2 n / 3) + 1 suffice. Here all are in the sum.

`--strengths` has local noise that gives a wanted R, whatever the rows: the table behind `recommended_dimensions`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from private_statistics import SEEDS, accuracy, dealt, features, merged_space, mu_of

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.methods.classstats_private.merge import strength
from fleetdistill.methods.classstats_private.sums import unit_rows
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.methods.classstats_private.server import ClassStatsPrivateServer
from fleetdistill_server.methods.traffic import Sizes, round_bytes

EPSILONS = (math.inf, 10.0, 3.0, 1.0, 0.3)
FLEETS = ((5, 3000), (20, 600), (20, 3000), (100, 600))
DIMENSIONS = (64, 128, 192)
STRENGTHS = (200, 250, 350, 500, 700, 1000, 1400, 2000)
FLEETS_BY_STRENGTH = ((5, 280), (20, 100), (20, 600), (100, 600))


def first(rows: Array, dimensions: int) -> Array:
    """Returns the extractor's rows with fewer numbers: the first ones, scaled to length sqrt(dimensions)."""
    return unit_rows(rows[:, :dimensions]) * math.sqrt(dimensions)


def releases(devices: Sequence[Array], mu: float, noise: str) -> tuple[Sequence[Array], float]:
    """Returns the rows behind each release, and the mu of its noise.

    Args:
        devices: Each device's rows.
        mu: Of a device's own noise.
        noise: `local` or `sum`.
    """
    if noise == "local":
        return devices, mu
    needed = 2 * len(devices) // 3 + 1
    return [np.concatenate(devices)], mu * math.sqrt(needed / len(devices))


class Figures:
    """Accuracy on one data set for each of `DIMENSIONS`."""

    def __init__(self, name: str) -> None:
        data = load_dataset(name, data_dir=Path(os.environ["FLEETDISTILL_DATA"]))
        train, test = (features(images, max(DIMENSIONS)) for images in (data.train_images, data.test_images))
        self.train, self.test = ([first(rows, count) for count in DIMENSIONS] for rows in (train, test))
        self.labels, self.test_labels = data.train_labels.numpy(), data.test_labels.numpy()

    def of(self, devices: int, rows: int, mu: float, noise: str) -> tuple[Array, float]:
        """Returns the accuracies in percent, `[3]`, means over the seeds, and R."""
        result = np.zeros(len(DIMENSIONS))
        for seed in SEEDS:
            parts, of_noise = releases(dealt(self.labels, devices, rows, math.inf, seed), mu, noise)
            spaces = [merged_space(train, self.labels, parts, of_noise, seed) for train in self.train]
            result += [accuracy(one, test, self.test_labels) for one, test in zip(spaces, self.test, strict=True)]
        return 100 * result / len(SEEDS), strength(devices * rows / len(parts), [of_noise] * len(parts))


def print_epsilons(name: str) -> None:
    """Prints the rows of one data set in the table by epsilon."""
    figures = Figures(name)
    for noise in ("local", "sum"):
        for devices, rows in FLEETS:
            cells = []
            for epsilon in EPSILONS:
                found, r = figures.of(devices, rows, mu_of(epsilon), noise)
                cell = " / ".join(f"{value:.1f}" for value in found)
                cells.append(f"{cell} ({r:.0f})" if math.isfinite(epsilon) else cell)
            print(f"| {name} | {devices} | {rows} | {noise} |", *(f"{cell} |" for cell in cells), flush=True)


def print_strengths(name: str) -> None:
    """Prints the rows of one data set in the table by R: the accuracy of 64 numbers, and what 128 and 192 add."""
    figures = Figures(name)
    for devices, rows in FLEETS_BY_STRENGTH:
        if devices * rows > len(figures.labels):
            continue
        cells = []
        for wanted in STRENGTHS:
            (usual, *others), _ = figures.of(devices, rows, wanted / (math.sqrt(devices) * rows), "local")
            cells.append(" ".join([f"{usual:.1f}", *(f"{value - usual:+.1f}" for value in others)]))
        print(f"| {name} | {devices} | {rows} |", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    """Prints a table as Markdown, and with the table by epsilon a device's bytes."""
    torch.set_num_threads(1)
    names = [name for name in sys.argv[1:] if name != "--strengths"]
    if len(names) < len(sys.argv) - 1:
        print("| data | devices | rows a device |", *(f"{wanted} |" for wanted in STRENGTHS))
        for name in names:
            print_strengths(name)
        return
    print("| data | devices | rows a device | noise | no noise | ε 10 | ε 3 | ε 1 | ε 0.3 |")
    for name in names:
        print_epsilons(name)
    for count in DIMENSIONS:
        config = ClassStatsPrivateConfig(epsilon=1, dimensions=count)
        print(count, round_bytes(ClassStatsPrivateServer.exchanges(config, Sizes()), "float32"))


if __name__ == "__main__":
    main()
