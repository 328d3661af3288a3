"""Variants of which one cannot be written as ONNX: the files of the others are complete."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from sklearn.datasets import load_digits
from support.open_device import open_device
from torch import nn

from fleetdistill import Deployment, Device, Predictor
from fleetdistill.compute import torch_compute
from fleetdistill.errors import ExportError, ModelError
from fleetdistill.testing import EventLog
from fleetdistill.training.model import split_sequential
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import OnnxReport
from fleetdistill_server.testing import MemoryServer

IMAGES, LABELS = load_digits(return_X_y=True)
INPUTS = (IMAGES[:400] / 16).reshape(-1, 1, 8, 8).astype(np.float32)
CONTRACT = {"classes": [str(label) for label in range(10)], "input_shape": [1, 8, 8]}


def network() -> nn.Module:
    """Its pooling from 8 to 3 pixels does not exist in ONNX."""
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10))
    return split_sequential(layers, after="2")


def play(folder: Path, deployment: Deployment) -> tuple[list[EventLog], Device]:
    """Plays one round of two devices; returns their events, and the first one, which is open."""
    logs = [EventLog(), EventLog()]
    with MemoryServer({"run": {"rounds": 1, "method": "classstats", "min_devices": 2}, "contract": CONTRACT}) as server:
        devices = [
            open_device(
                server=server.link(),
                state_dir=folder / str(number),
                model=network,
                data=(INPUTS[number::2], LABELS[:400][number::2]),
                deployment=deployment,
                on_event=log.append,
            )
            for number, log in enumerate(logs)
        ]
        server.play(*devices)
        devices[1].close()
    return logs, devices[0]


@pytest.mark.parametrize("quantize", [None, "dynamic"])
def test_only_the_file_of_the_variant_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quantize: Literal["dynamic"] | None
) -> None:
    with caplog.at_level(logging.WARNING, "fleetdistill"):
        logs, device = play(tmp_path, Deployment(quantize=quantize))
    with device:
        names = {path.name for path in device.state_dir.glob("*.onnx")}
        assert names == {"model.onnx", "general.onnx", "personal.onnx"}
        for variant in ("model", "general", "personal"):
            predictor = Predictor(device.state_dir, variant=variant)
            assert (predictor.error, predictor.version) == ("", 1)
        found = Predictor(device.state_dir).predict(INPUTS[:50])
        assert (found.argmax(1) == device.predict(INPUTS[:50]).argmax(1)).mean() > 0.9
        assert "There are general, model, personal" in Predictor(device.state_dir, variant="own").error
    for log in logs:
        assert log.of("exported").values["version"] == 1
        missing = log.of("not-exported")
        assert missing.values == {"version": 1, "error": "ExportError", "variant": "own"}
        assert missing.text == (
            "variant 'own' of version 1 could not be exported: ExportError: tracing the model failed: "
            "SymbolicValueError: Unsupported: ONNX export of operator adaptive_avg_pool2d, output size that are not "
            "factor of input size; replace this layer; own.onnx is not written, the other files are. Tried again at "
            "the next delivery"
        )
        assert missing.text in caplog.text


def test_without_the_variant_in_use_no_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of others alone would not be what `device.predict` says."""

    def fail(model: nn.Module, path: Path, samples: Any, metadata: Mapping[str, str], **options: Any) -> OnnxReport:
        if metadata["answer"] == "general":
            raise ExportError("general fails")
        return export_onnx(model, path, samples, metadata, **options)

    monkeypatch.setattr(torch_compute, "export_onnx", fail)
    logs, device = play(tmp_path, Deployment())
    with device:
        assert not list(device.state_dir.glob("*.onnx"))
        assert device.predict(INPUTS[:2]).shape == (2, 10)
        with pytest.raises(ModelError, match="no usable model"):
            Predictor(device.state_dir).predict(INPUTS[:2])
    for log in logs:
        event = log.of("not-exported")
        assert event.values == {"version": 1, "error": "ExportError"}
        assert "general fails; the previous file remains" in event.text
