"""The demo: five devices with five different models train together on real digits, over real gRPC.

Runs a method with several rounds, then classstats with a single exchange on the same fleet. Front, engine and devices
are separate processes on this machine. `make demo` runs this script.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fleetdistill import FleetDistillError
from fleetdistill_lab import (
    FleetReport,
    Simulation,
    exchange_lines,
    show_comparison,
    show_run,
    simulate_with_progress,
    write_report,
)

SEED = 2026  # arbitrary; the default settings were chosen on other seeds
ALPHA = 0.1  # as in README.md's comparison of all methods
ROUNDS = 10  # a third of those there, to take less than a minute
ONE_EXCHANGE = "classstats"


def main() -> None:
    """Runs the demo and writes report.json, fleet.png and the ONNX models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="feddkc", help="name of the method")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results")
    given = parser.parse_args()
    rounds = None if given.method == ONE_EXCHANGE else ROUNDS
    try:
        demo(Simulation(method=given.method, link="grpc", alpha=ALPHA, rounds=rounds, seed=SEED, out=given.out))
    except FleetDistillError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def demo(wanted: Simulation) -> None:
    """Runs the method with its controls, then one exchange of class statistics unless that is the method."""
    report = simulate_with_progress(wanted, if_there="overwrite")
    show_run(report)
    if wanted.method != ONE_EXCHANGE:
        report = then_exchange(wanted, report)
    show_comparison(report, wanted.out)


def then_exchange(wanted: Simulation, report: FleetReport) -> FleetReport:
    """Runs classstats on the same fleet; returns the report with both comparisons and curves."""
    out = wanted.out / ONE_EXCHANGE
    exchange = simulate_with_progress(same_fleet(wanted, report, out), if_there="overwrite")
    print(*exchange_lines(exchange, out), sep="\n")
    both = replace(
        report,
        comparison=[*report.comparison, *exchange.comparison],
        curves=[*report.curves, *exchange.curves],
    )
    write_report(both, wanted.out)
    return both


def same_fleet(wanted: Simulation, report: FleetReport, out: Path) -> Simulation:
    """Returns the settings of the exchange: the fleet of the first simulation, without controls."""
    return replace(
        wanted,
        method=ONE_EXCHANGE,
        settings={},
        rounds=None,
        models=tuple(device.model for device in report.devices),
        proxy_per_class=report.proxy_per_class,
        with_alone=False,
        with_fedavg=False,
        out=out,
    )


if __name__ == "__main__":
    main()
