"""A fleet on custom data: arrays in memory, or an .npz file on the command line.

    python examples/own_data.py
    cd examples && fleetdistill simulate --dataset ../out/own-data/wine.npz --method fedavg --model own_model:wide \\
        --devices 3 --set simulation.partition=classes_random

The data are scikit-learn's wines: 178 rows of 13 measurements from 3 growers. The built-in models expect images, so the
model is one of own_model.py. Each device has wines from two growers and learns about the third from other devices.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from own_model import wide
from sklearn.datasets import load_wine

from fleetdistill_lab import Simulation, simulate


def wines() -> dict[str, np.ndarray]:
    """Returns inputs `[178, 13]` float32, standardized per measurement, labels in [0, 3), and class names."""
    wine = load_wine()
    inputs = (wine.data - wine.data.mean(0)) / wine.data.std(0)
    return {"inputs": inputs.astype(np.float32), "labels": wine.target, "classes": wine.target_names}


def main() -> None:
    """Simulates the fleet, and writes the data to a file for the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--link", choices=["memory", "grpc"], default="memory")
    parser.add_argument("--out", type=Path, default=Path("out/own-data"))
    given = parser.parse_args()
    wanted = Simulation(
        dataset=wines(),
        method="fedavg",
        models=[wide],
        partition="classes_random",
        classes_per_device=2,
        devices=3,
        rounds=given.rounds,
        link=given.link,
        with_fedavg=False,
        out=given.out,
    )
    report = simulate(wanted, if_there="overwrite")
    np.savez(given.out / "wine.npz", **wines())
    print(f"{len(report.class_names)} classes: {', '.join(report.class_names)}; each device has wines from two of them")
    print(f"alone {report.mean_accuracy_alone:.1%}, in the fleet {report.mean_accuracy_fleet:.1%} on the test set")
    print(f"wrote the data to {given.out / 'wine.npz'}")


if __name__ == "__main__":
    main()
