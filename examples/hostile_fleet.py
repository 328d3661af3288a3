"""The effect of one hostile device in ten, with and without `[method] robust`: four short FedAvg runs on the digits.

    python examples/hostile_fleet.py --attack reversed --rounds 6

All runs use the same data, partition and initial weights. The table shows the global model's accuracy after each round
and the devices that the server reported. `fleetdistill_lab.simulation.spec.hostile` defines the attacks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleetdistill.errors import RunError
from fleetdistill_lab import ATTACKS, Simulation, simulate


def main() -> None:
    """Runs the fleet with and without the attack and the defence, and prints a table."""
    given = parse_arguments()
    table = Table(title=f"FedAvg, {given.devices} devices; the hostile one {ATTACKS[given.attack]}")
    for name in ("", "robust", "accuracy by round", "reported by the server"):
        table.add_column(name)
    for hostile in (0, 1):
        for robust in ("off", "gross"):
            accuracies, named = run(hostile, robust, given)
            table.add_row(f"{hostile} hostile", robust, accuracies, named)
    Console().print(table)


def run(hostile: int, robust: str, given: argparse.Namespace) -> tuple[str, str]:
    """Runs one simulation; returns the accuracies and the reported devices as text."""
    wanted = Simulation(
        method="fedavg",
        settings={"robust": robust},
        devices=given.devices,
        rounds=given.rounds,
        alpha=0.5,
        hostile=hostile,
        attack=given.attack,
        with_alone=False,
        out=given.out / f"{hostile}-hostile-{robust}",
    )
    try:
        report = simulate(wanted, if_there="overwrite")
    except RunError:
        return "the run failed: no round has a result", ""
    accuracies = " ".join("-" if item is None else f"{item:.0%}" for item in report.global_accuracy_by_round)
    return accuracies, ", ".join(report.named)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", choices=list(ATTACKS), default="reversed")
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/hostile_fleet"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
