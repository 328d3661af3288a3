"""Aggregation server of fleetdistill: the base of the methods' server halves, and their registry.

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

__all__ = [
    "Cohort",
    "ServerMethod",
    "__version__",
    "register",
]

_WHERE = {
    "Cohort": "fleetdistill_server.methods.cohort",
    "ServerMethod": "fleetdistill_server.methods.base",
    "__version__": "fleetdistill.version:VERSION",
    "register": "fleetdistill_server.methods",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
