"""`Deployment` refuses what cannot work when it is constructed, and the device what has no effect on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hostile_server import LyingLink, device_at
from support.processes import python

from fleetdistill import Deployment
from fleetdistill.compute import light_worker
from fleetdistill.errors import ConfigurationError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"keep_versions": 0}, "keep_versions is 0, must be at least 1"),
        ({"max_accuracy_drop": -0.1}, r"max_accuracy_drop is -0.1, must be in \[0, 1\]"),
        ({"max_accuracy_drop": math.nan}, r"max_accuracy_drop is nan, must be in \[0, 1\]"),
        ({"max_quantization_drop": 1.5}, r"max_quantization_drop is 1.5, must be in \[0, 1\]"),
        ({"opset": 12}, "opset is 12, must be 13 to 20"),
        ({"opset": 21}, "opset is 21, must be 13 to 20"),
        ({"max_bytes": 0}, "max_bytes is 0, must be at least 1"),
        ({"quantize": "Static"}, "unknown quantize 'Static'; did you mean 'static'"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Deployment(**settings)


def test_quantisation_needs_its_packages_at_once() -> None:
    code = """
from support.without_torch import block
block("onnx")
from fleetdistill import Deployment, FleetDistillError
try:
    Deployment(quantize="static")
except FleetDistillError as error:
    print(error)
"""
    assert python(code) == "quantize requires onnx: pip install 'fleetdistill[onnx]'\n"


ARRAYS = (np.zeros((4, 1, 8, 8), np.float32), np.arange(4))


@pytest.mark.parametrize(
    ("settings", "device", "sentence"),
    [
        ({"max_bytes": 9}, {"export": "never"}, 'max_bytes has no effect with export="never"'),
        (
            {"quantize": "static", "opset": 17},
            {"export": "never"},
            'quantize, opset has no effect with export="never"; remove one of them',
        ),
        (
            {"opset": 17, "dynamic_size": True},
            {"worker": light_worker(ARRAYS), "model": None, "data": None, "export": "round"},
            r"opset, dynamic_size has no effect with worker=...; the worker defines the graph",
        ),
    ],
)
def test_settings_without_effect_are_refused_before_storing(
    tmp_path: Path, settings: dict[str, Any], device: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        device_at(LyingLink(), tmp_path / "state", **device, deployment=Deployment(**settings))
    assert not (tmp_path / "state").exists()
