"""What computes for a device: the protocol `Compute`, its backend with PyTorch, and the one without (extra `light`).

Exported names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute, Computed, MakeCompute
    from fleetdistill.compute.light_compute import light_worker

__all__ = ["Compute", "Computed", "MakeCompute", "light_worker"]

_WHERE = {
    "Compute": "fleetdistill.compute.base",
    "Computed": "fleetdistill.compute.base",
    "MakeCompute": "fleetdistill.compute.base",
    "light_worker": "fleetdistill.compute.light_compute",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
