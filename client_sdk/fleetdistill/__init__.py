"""The device SDK of fleetdistill: federated knowledge distillation for fleets of edge devices.

Importing it is light: torch, onnx and onnxruntime are loaded by the parts that need them, when they need them.
"""

from fleetdistill.device.arguments import COLUMNS
from fleetdistill.device.device import Device
from fleetdistill.device.events import Event, Step
from fleetdistill.errors import FleetDistillError
from fleetdistill.version import VERSION as __version__

__all__ = ["COLUMNS", "Device", "Event", "FleetDistillError", "Step", "__version__"]
