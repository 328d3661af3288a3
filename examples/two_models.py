"""A fleet of two devices with two different models: what does each model gain, and with which method?

    python examples/two_models.py

Both devices have handwritten digits, but hardly any of some classes. Each figure is the accuracy on all classes and,
after the slash, on the device's own mix of classes. "alone" is the same model with the same training and no fleet. The
table also shows where a method does not help. cdkt gives both devices 80 further samples with labels, its proxy set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fleetdistill_lab import DeviceReport, Simulation, simulate

MODELS = ("digits_linear", "digits_cnn_small")
METHODS = ("feddkc", "cdkt", "classstats")
"""Methods for devices with different models."""
ROW = "{:11} {:17} {:>15} {:>15} {:>15} {:>7}"


def main() -> None:
    """Runs the fleet with each method and prints a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of training; classstats needs one exchange")
    parser.add_argument("--seed", type=int, default=0, help="of the partition, the weights and the batches")
    parser.add_argument("--out", type=Path, default=Path("out/two-models"))
    given = parser.parse_args()
    print(ROW.format("method", "model", "alone", "in the fleet", "gain in points", "kB"))
    for method in METHODS:
        for device in run(method, given):
            print(ROW.format(method, device.model, *figures(device)), flush=True)


def run(method: str, given: argparse.Namespace) -> list[DeviceReport]:
    """Simulates a device with each model, on the same data for every method."""
    wanted = Simulation(
        method=method,
        models=MODELS,
        devices=len(MODELS),
        alpha=0.2,
        proxy_per_class=8,  # held out for every method, so that all of them train on the same samples
        rounds=1 if method == "classstats" else given.rounds,
        control_rounds=given.rounds,
        seed=given.seed,
        with_fedavg=False,  # FedAvg requires equal models
        out=given.out / method,
    )
    return simulate(wanted, if_there="overwrite").devices


def figures(device: DeviceReport) -> tuple[str, ...]:
    """Returns accuracy alone, accuracy in the fleet, the difference, and the traffic of the run as text."""
    alone, own_alone = device.accuracy_alone or 0.0, device.own_accuracy_alone or 0.0
    fleet, own_fleet = device.accuracy_fleet, device.own_accuracy_fleet
    return (
        f"{alone:.1%} / {own_alone:.1%}",
        f"{fleet:.1%} / {own_fleet:.1%}",
        f"{100 * (fleet - alone):+.1f} / {100 * (own_fleet - own_alone):+.1f}",
        f"{(device.bytes_up + device.bytes_down) / 1000:,.0f}",
    )


if __name__ == "__main__":
    main()
