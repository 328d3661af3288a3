"""One hostile device of ten, and what `[method] robust` does about it: FedAvg on the digits, four runs of seconds each.

    python examples/hostile_fleet.py --attack reversed --rounds 6

The same data, partition and first weights each time. Shown is the global model's accuracy after every round, and whom
the server named. The attacks are those of `fleetdistill_server.simulation.spec.hostile`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleetdistill.errors import RunError
from fleetdistill_server import Simulation, simulate
from fleetdistill_server.simulation import ATTACKS


def main() -> None:
    """Runs the fleet with and without the attack and the defence, and prints a table."""
    given = parse_arguments()
    table = Table(title=f"FedAvg, {given.devices} devices; the hostile one {ATTACKS[given.attack]}")
    for name in ("", "robust", "accuracy by round", "named by the server"):
        table.add_column(name)
    for hostile in (0, 1):
        for robust in ("off", "gross"):
            accuracies, named = run(hostile, robust, given)
            table.add_row(f"{hostile} hostile", robust, accuracies, named)
    Console().print(table)


def run(hostile: int, robust: str, given: argparse.Namespace) -> tuple[str, str]:
    """One simulation; accuracies and names, or that the run came to nothing."""
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
        return "the run ends: no round has a result", ""
    accuracies = " ".join("-" if one is None else f"{one:.0%}" for one in report.global_accuracy_by_round)
    return accuracies, ", ".join(report.named)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", choices=list(ATTACKS), default="reversed")
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/hostile_fleet"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
