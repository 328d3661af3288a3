"""Server of fleetdistill: custom methods and simulated fleets.

    from fleetdistill_server import Simulation, simulate

    report = simulate(Simulation(method="feddkc", devices=5, rounds=10))

Exported names are imported on first use, so importing the package loads neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill.version import VERSION as __version__
    from fleetdistill_server.methods import register
    from fleetdistill_server.methods.base import ServerMethod
    from fleetdistill_server.methods.cohort import Cohort
    from fleetdistill_server.simulation.fleet import simulate
    from fleetdistill_server.simulation.spec.settings import Simulation
    from fleetdistill_server.simulation.timing.behaviour import FleetBehaviour
    from fleetdistill_server.simulation.timing.traces import read_traces

__all__ = [
    "Cohort",
    "FleetBehaviour",
    "ServerMethod",
    "Simulation",
    "__version__",
    "read_traces",
    "register",
    "simulate",
]

_WHERE = {
    "Cohort": "fleetdistill_server.methods.cohort",
    "FleetBehaviour": "fleetdistill_server.simulation.timing.behaviour",
    "ServerMethod": "fleetdistill_server.methods.base",
    "Simulation": "fleetdistill_server.simulation.spec.settings",
    "__version__": "fleetdistill.version:VERSION",
    "read_traces": "fleetdistill_server.simulation.timing.traces",
    "register": "fleetdistill_server.methods",
    "simulate": "fleetdistill_server.simulation.fleet",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
