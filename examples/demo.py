"""The demo: five devices with five different models learn together on real digits, over real gRPC.

Front, engine and devices are processes of their own on the loopback. `make demo` runs this.
"""

import argparse
import sys
from pathlib import Path

from fleetdistill import FleetDistillError
from fleetdistill_server.simulation.settings import Simulation
from fleetdistill_server.simulation.show import simulate_and_show

SEED = 2026  # not chosen by its result; the settings are the defaults, which were found on other seeds


def main() -> None:
    """Runs the demo and writes report.json, fleet.png and the ONNX models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="feddkc", help="name of the method")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results")
    given = parser.parse_args()
    try:
        simulate_and_show(Simulation(method=given.method, link="grpc", rounds=30, alpha=0.5, seed=SEED, out=given.out))
    except FleetDistillError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
