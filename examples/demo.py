"""The demo: five devices with five different models learn together on real digits, over real gRPC.

First a method of many rounds, then the same fleet makes one exchange of class statistics. Front, engine and devices are
processes of their own on the loopback. `make demo` runs this.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fleetdistill import FleetDistillError
from fleetdistill_server import Simulation
from fleetdistill_server.simulation import (
    FleetReport,
    exchange_lines,
    show_comparison,
    show_run,
    simulate_with_progress,
    write_report,
)

SEED = 2026  # not chosen by its result; the settings are the defaults, which were found on other seeds
ONE_EXCHANGE = "classstats"


def main() -> None:
    """Runs the demo and writes report.json, fleet.png and the ONNX models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="feddkc", help="name of the method")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results")
    given = parser.parse_args()
    try:
        demo(Simulation(method=given.method, link="grpc", alpha=0.5, seed=SEED, out=given.out))
    except FleetDistillError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def demo(wanted: Simulation) -> None:
    """The method with its controls; then, unless it is that one itself, one exchange of class statistics."""
    report = simulate_with_progress(wanted, if_there="overwrite")
    show_run(report)
    if wanted.method != ONE_EXCHANGE:
        report = then_exchange(wanted, report)
    show_comparison(report, wanted.out)


def then_exchange(wanted: Simulation, report: FleetReport) -> FleetReport:
    """The same data, partition, seed and devices with class statistics; its comparison and curves join the report's."""
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
    """What the first simulation was about, for the exchange; its controls are there already."""
    return replace(
        wanted,
        method=ONE_EXCHANGE,
        settings={},
        models=tuple(one.model for one in report.devices),
        proxy_per_class=report.proxy_per_class,
        with_alone=False,
        with_fedavg=False,
        out=out,
    )


if __name__ == "__main__":
    main()
