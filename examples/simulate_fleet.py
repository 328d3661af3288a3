"""Compares FedDKC's refinements on one simulated fleet, with local training as the control.

    python examples/simulate_fleet.py --rounds 10 --alpha 0.5 --seed 0

All runs use the same data, partition and initial weights, so their differences come from the refinement. One seed only
demonstrates the comparison; benchmarks/experiments/feddkc.py uses several seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleetdistill_lab import FleetReport, Simulation, simulate

REFINEMENTS = ("none", "kkr", "skr")


def main() -> None:
    """Runs each refinement once and prints a table."""
    given = parse_arguments()
    reports = {name: run(name, given) for name in REFINEMENTS}
    Console().print(compare(reports))


def run(refinement: str, given: argparse.Namespace) -> FleetReport:
    """Runs one simulation in this process, with its own folder for report, plot and models."""
    wanted = Simulation(
        method="feddkc",
        settings={"refinement": refinement},
        rounds=given.rounds,
        alpha=given.alpha,
        seed=given.seed,
        with_alone=refinement == REFINEMENTS[0],  # equal for all refinements
        with_fedavg=False,
        out=given.out / refinement,
    )
    report = simulate(wanted, if_there="overwrite")
    print(f"{refinement}: {report.mean_accuracy_fleet:.1%} after {report.seconds:.0f} s", flush=True)
    return report


def compare(reports: dict[str, FleetReport]) -> Table:
    """Returns a table of the devices' mean accuracy, on all and on their own classes, and of the bytes sent."""
    alone = reports[REFINEMENTS[0]]
    assert alone.mean_accuracy_alone is not None
    assert alone.mean_own_accuracy_alone is not None
    table = Table(title=f"{alone.dataset}, {alone.partition}, seed {alone.seed}, {alone.rounds} rounds")
    for name in ("", "global test", "own classes", "bytes up", "guards"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("alone", f"{alone.mean_accuracy_alone:.1%}", f"{alone.mean_own_accuracy_alone:.1%}", "0", "")
    for name, report in reports.items():
        sent = sum(device.bytes_up for device in report.devices)
        figures = (f"{report.mean_accuracy_fleet:.1%}", f"{report.mean_own_accuracy_fleet:.1%}")
        table.add_row(name, *figures, f"{sent:,}", str(report.guards_fired))
    return table


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.5,
        help="Dirichlet parameter: small values give devices different classes, large ones equal shares",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/refinements"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
