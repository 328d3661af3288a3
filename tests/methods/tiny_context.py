"""The context of server halves whose models are a test's own: three classes, inputs of six numbers, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext

CLASSES, INPUTS = 3, 6


def tiny_context(model: str, **changes: Any) -> MethodContext:
    """Returns the context of a run with a device model; `changes` replace arguments of `MethodContext`."""
    settings: dict[str, Any] = {
        "classes": CLASSES,
        "input_shape": (INPUTS,),
        "models": ModelSection(device=model),
        "torch_device": torch.device("cpu"),
        "seed": 3,
    }
    return MethodContext(**{**settings, **changes})
