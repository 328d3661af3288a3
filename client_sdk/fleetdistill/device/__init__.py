"""`Device`, its events, the columns that may leave a device, and the compute backends."""

from fleetdistill.device.arguments import COLUMNS, DEFAULT_COLUMNS
from fleetdistill.device.async_device import AsyncDevice
from fleetdistill.device.device import Device
from fleetdistill.device.events import Event, Step
from fleetdistill.device.inspection import Inspection, inspect

__all__ = ["COLUMNS", "DEFAULT_COLUMNS", "AsyncDevice", "Device", "Event", "Inspection", "Step", "inspect"]
