"""Experiments on one machine: simulated fleets, the privacy audit of a run, and conformance tests of the wire format.

    from fleetdistill_lab import Simulation, simulate

    report = simulate(Simulation(devices=5))

Exported names are imported on first use, so importing the package loads neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.fleet import simulate
    from fleetdistill_lab.simulation.spec.settings import Simulation
    from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
    from fleetdistill_lab.simulation.timing.traces import read_traces

__all__ = ["FleetBehaviour", "Simulation", "read_traces", "simulate"]

_WHERE = {
    "FleetBehaviour": "fleetdistill_lab.simulation.timing.behaviour",
    "Simulation": "fleetdistill_lab.simulation.spec.settings",
    "read_traces": "fleetdistill_lab.simulation.timing.traces",
    "simulate": "fleetdistill_lab.simulation.fleet",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
