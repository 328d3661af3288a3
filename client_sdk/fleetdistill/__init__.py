"""The device SDK of fleetdistill: federated knowledge distillation for fleets of edge devices.

Exported names are imported on first use, so a process that only predicts loads no gRPC. Importing `Device` does not
load torch, onnx or onnxruntime; they are imported when they are first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill.data.splits import Splits
    from fleetdistill.deployment.predictor import Predictor
    from fleetdistill.deployment.settings import Deployment
    from fleetdistill.device.async_device import AsyncDevice
    from fleetdistill.device.budgets import Budgets
    from fleetdistill.device.device import Device
    from fleetdistill.device.eligibility import Eligibility
    from fleetdistill.device.endorsing import Signer
    from fleetdistill.device.events import Event, Step
    from fleetdistill.device.options import Runtime, Server
    from fleetdistill.device.secure import SecureTerms
    from fleetdistill.errors import FleetDistillError
    from fleetdistill.link.abilities import Abilities
    from fleetdistill.models.torch_model import TorchModel
    from fleetdistill.version import VERSION as __version__
    from fleetdistill.wire.kind import COLUMNS

__all__ = [
    "COLUMNS",
    "Abilities",
    "AsyncDevice",
    "Budgets",
    "Deployment",
    "Device",
    "Eligibility",
    "Event",
    "FleetDistillError",
    "Predictor",
    "Runtime",
    "SecureTerms",
    "Server",
    "Signer",
    "Splits",
    "Step",
    "TorchModel",
    "__version__",
]

_WHERE = {
    "COLUMNS": "fleetdistill.wire.kind",
    "Abilities": "fleetdistill.link.abilities",
    "AsyncDevice": "fleetdistill.device.async_device",
    "Budgets": "fleetdistill.device.budgets",
    "Deployment": "fleetdistill.deployment.settings",
    "Device": "fleetdistill.device.device",
    "Eligibility": "fleetdistill.device.eligibility",
    "Event": "fleetdistill.device.events",
    "FleetDistillError": "fleetdistill.errors",
    "Predictor": "fleetdistill.deployment.predictor",
    "Runtime": "fleetdistill.device.options",
    "SecureTerms": "fleetdistill.device.secure",
    "Server": "fleetdistill.device.options",
    "Signer": "fleetdistill.device.endorsing",
    "Splits": "fleetdistill.data.splits",
    "Step": "fleetdistill.device.events",
    "TorchModel": "fleetdistill.models.torch_model",
    "__version__": "fleetdistill.version:VERSION",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
