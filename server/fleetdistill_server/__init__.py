"""Server of fleetdistill: custom methods and simulated fleets.

    from fleetdistill_server import Simulation, simulate

    report = simulate(Simulation(method="feddkc", devices=5, rounds=10))

Exported names are imported on first use, so importing the package loads neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetdistill.version import VERSION as __version__
    from fleetdistill_server.methods import register
    from fleetdistill_server.methods.base import ServerMethod
    from fleetdistill_server.methods.cohort import Cohort
    from fleetdistill_server.simulation.fleet import simulate
    from fleetdistill_server.simulation.spec.settings import Simulation

__all__ = ["Cohort", "ServerMethod", "Simulation", "__version__", "register", "simulate"]

_WHERE = {
    "Cohort": "fleetdistill_server.methods.cohort",
    "ServerMethod": "fleetdistill_server.methods.base",
    "Simulation": "fleetdistill_server.simulation.spec.settings",
    "__version__": "fleetdistill.version:VERSION",
    "register": "fleetdistill_server.methods",
    "simulate": "fleetdistill_server.simulation.fleet",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, found = _WHERE[name].partition(":")
    return getattr(import_module(module), found or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
