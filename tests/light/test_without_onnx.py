"""A device without PyTorch and without the package `onnx`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.uninstalled import without

_DEVICE = """
import sys
import numpy as np
from fleetdistill import Deployment, Device
from fleetdistill.errors import ConfigurationError
from fleetdistill.compute import light_worker

worker = light_worker((np.zeros((10, 1, 8, 8), np.float32), np.arange(10)))
try:
    deployment = Deployment(**eval(sys.argv[2]))
    device = Device(server="127.0.0.1:1", worker=worker, state_dir=sys.argv[1], deployment=deployment)
    device.close(leave=False)
    print("opened")
except ConfigurationError as error:
    print(error)
"""


def opened(tmp_path: Path, given: str, *packages: str) -> str:
    command = [sys.executable, "-c", _DEVICE, str(tmp_path / "state"), given]
    done = subprocess.run(command, env=without(tmp_path, *packages), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("given", ["{}", "{'export': 'round'}", "{'export': 'finish'}"])
def test_export_without_onnx_package_is_refused_before_run(tmp_path: Path, given: str) -> None:
    when = eval(given).get("export", "round")
    assert opened(tmp_path, given, "onnx") == (
        f"Deployment(export=\"{when}\") requires the package onnx: pip install 'fleetdistill[onnx]', or pass "
        'Device(deployment=Deployment(export="never")); predict and model work without a file'
    )
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("given", "missing"), [("{'export': 'never'}", "onnx"), ("{}", "torch")])
def test_without_an_export_or_with_the_package_it_opens(tmp_path: Path, given: str, missing: str) -> None:
    assert opened(tmp_path, given, missing) == "opened"
