"""The device SDK of fleetdistill: federated knowledge distillation for fleets of edge devices.

`import fleetdistill` does not load torch, onnx or onnxruntime; they are imported when they are first needed.
"""

from fleetdistill.device.arguments import COLUMNS
from fleetdistill.device.device import Device
from fleetdistill.device.events import Event, Step
from fleetdistill.errors import FleetDistillError
from fleetdistill.version import VERSION as __version__

__all__ = ["COLUMNS", "Device", "Event", "FleetDistillError", "Step", "__version__"]
