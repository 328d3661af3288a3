"""The server of fleetdistill: methods of your own, and simulated fleets.

    from fleetdistill_server import Simulation, simulate

    report = simulate(Simulation(method="feddkc", devices=5, rounds=10))

Names are looked up when they are used, so that importing the package loads neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleetdistill.version import VERSION as __version__

if TYPE_CHECKING:
    from fleetdistill_server.methods import register
    from fleetdistill_server.methods.base import ServerMethod
    from fleetdistill_server.methods.cohort import Cohort
    from fleetdistill_server.simulation.fleet import simulate
    from fleetdistill_server.simulation.spec.settings import Simulation

__all__ = ["Cohort", "ServerMethod", "Simulation", "__version__", "register", "simulate"]

_WHERE = {
    "Cohort": "methods.cohort",
    "ServerMethod": "methods.base",
    "Simulation": "simulation.spec.settings",
    "register": "methods",
    "simulate": "simulation.fleet",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
