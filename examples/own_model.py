"""Custom models in a fleet: a common extractor of all device models, two device models, and a server model.

    python examples/own_model.py
    cd examples && fleetdistill simulate --method feddkc --set simulation.extractor=own_model:extractor \\
        --set simulation.server_model=own_model:server_model \\
        --model own_model:narrow --model own_model:wide --set method.learning_rate=0.05

A model is made by a function at the top level of a module, which server and device processes import by its path.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import prod
from pathlib import Path

from torch import nn

from fleetdistill.training import SplitModel, split_sequential
from fleetdistill_lab import Simulation, simulate

FEATURES = 64


def extractor(input_shape: Sequence[int]) -> nn.Sequential:
    """Makes the common extractor: inputs `[batch, *input_shape]` to features `[batch, 64]`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), FEATURES), nn.ReLU())


def narrow(input_shape: Sequence[int], classes: int) -> SplitModel:
    """Makes a model of the extractor and one linear layer."""
    return split_sequential(nn.Sequential(*extractor(input_shape), nn.Linear(FEATURES, classes)), after=3)


def wide(input_shape: Sequence[int], classes: int) -> SplitModel:
    """Makes a model of the extractor, a hidden layer of 64 and a linear layer."""
    head = (nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, classes))
    return split_sequential(nn.Sequential(*extractor(input_shape), *head), after=3)


def server_model(feature_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Makes the server's predictor on the devices' features."""
    return nn.Sequential(nn.Linear(prod(feature_shape), 64), nn.ReLU(), nn.Linear(64, classes))


def main() -> None:
    """Simulates a fleet of both models on the digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", choices=["memory", "grpc"], default="memory")
    parser.add_argument("--out", type=Path, default=Path("out/own-model"))
    given = parser.parse_args()
    wanted = Simulation(
        method="feddkc",
        settings={"learning_rate": 0.05, "local_epochs": 5},
        models=[narrow, wide],
        extractor=extractor,
        server_model=server_model,
        devices=4,
        rounds=given.rounds,
        link=given.link,
        with_fedavg=False,
        out=given.out,
    )
    report = simulate(wanted, if_there="overwrite")
    for device in report.devices:
        print(f"{device.name}  {device.model:18}  {device.parameters:,} parameters  {device.accuracy_fleet:.1%}")
    print(f"mean accuracy: alone {report.mean_accuracy_alone:.1%}, in the fleet {report.mean_accuracy_fleet:.1%}")


if __name__ == "__main__":
    main()
