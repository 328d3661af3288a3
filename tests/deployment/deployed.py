"""Devices that have delivered some versions of a small model, and ONNX files as a device writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.hostile_server import CLASSES, Events, LyingLink, ask, device_at
from torch import nn

from fleetdistill import Device
from fleetdistill.deployment.stamp import stamp
from fleetdistill.training.onnx_export import export_onnx

BATCH = np.random.default_rng(1).random((5, 4)).astype(np.float32)


def device_of(state_dir: Path, rounds: range, **changes: Any) -> tuple[Device, Events]:
    """A device that is asked once in each of these rounds; `step(0)` plays one, and then the run is over."""
    link = LyingLink(*(ask(round=number) for number in rounds))
    return device_at(link, state_dir, **{"export": "round", **changes})


def linear(version: int) -> nn.Module:
    """A model that no other version equals."""
    model = nn.Linear(4, CLASSES)
    with torch.no_grad():
        model.weight.fill_(version)
        model.bias.zero_()
    return model


def file_of(version: int, folder: Path) -> bytes:
    """The file of `linear(version)`."""
    path = folder / "float.onnx"
    export_onnx(linear(version), path, torch.from_numpy(BATCH), {"run": "r", "round": str(version)})
    return stamp(path.read_bytes(), {"version": str(version)})


def logits_of(version: int) -> np.ndarray:
    """What `linear(version)` answers for `BATCH`."""
    return np.repeat(version * BATCH.sum(axis=1, keepdims=True), CLASSES, axis=1)
