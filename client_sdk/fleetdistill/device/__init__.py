"""`Device`, its events, the columns that may leave a device, and the compute backends.

Exported names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill.device.async_device import AsyncDevice
    from fleetdistill.device.device import Device
    from fleetdistill.device.events import Event, Step
    from fleetdistill.device.inspection import Inspection, inspect
    from fleetdistill.wire.kind import COLUMNS, DEFAULT_COLUMNS

__all__ = ["COLUMNS", "DEFAULT_COLUMNS", "AsyncDevice", "Device", "Event", "Inspection", "Step", "inspect"]

_WHERE = {
    "AsyncDevice": "fleetdistill.device.async_device",
    "COLUMNS": "fleetdistill.wire.kind",
    "DEFAULT_COLUMNS": "fleetdistill.wire.kind",
    "Device": "fleetdistill.device.device",
    "Event": "fleetdistill.device.events",
    "Inspection": "fleetdistill.device.inspection",
    "Step": "fleetdistill.device.events",
    "inspect": "fleetdistill.device.inspection",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
