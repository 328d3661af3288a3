"""What a process loads: devices stay light, and the front knows no method.

What a file may import, import-linter holds (pyproject.toml, `make check`).
"""

from __future__ import annotations

import json

import pytest
from support.processes import python

HEAVY = (
    *("torch", "torchvision", "onnx", "onnxruntime", "pydantic", "typer", "rich"),
    *("safetensors", "sqlite_utils", "fleetdistill_server"),
)


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after running code."""
    return set(json.loads(python(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")))


def of_packages(modules: set[str], *packages: str) -> set[str]:
    return {module for module in modules if any(module == one or module.startswith(f"{one}.") for one in packages)}


def test_a_device_is_light_to_import() -> None:
    loaded = loaded_by("from fleetdistill import *")
    assert of_packages(loaded, *HEAVY) == set()
    assert "fleetdistill.device.device" in loaded


def test_importing_device_loads_only_what_an_idle_device_needs() -> None:
    loaded = loaded_by("from fleetdistill import Device")
    unneeded = ("fleetdistill.knowledge", "fleetdistill.methods", "fleetdistill.training", "fleetdistill.light")
    slow = ("importlib.metadata", "numpy.typing", "zipfile", "difflib", "email", "tempfile")
    assert of_packages(loaded, *unneeded, *slow) == set()


def test_the_package_alone_loads_no_grpc() -> None:
    assert (
        of_packages(loaded_by("import fleetdistill; fleetdistill.FleetDistillError"), *HEAVY, "grpc", "numpy") == set()
    )


def test_a_device_reaches_its_server_without_torch() -> None:
    loaded = loaded_by(
        "import fleetdistill.link.grpc_link, fleetdistill.link.downloads, fleetdistill.state.directory;"
        "import fleetdistill.device.consent"
    )
    assert of_packages(loaded, *HEAVY) == set()


def test_the_front_knows_neither_torch_nor_methods() -> None:
    loaded = loaded_by("import fleetdistill_server.front.process")
    methods = of_packages(loaded, "fleetdistill.methods", "fleetdistill_server.methods")
    assert of_packages(loaded, "torch", "torchvision", "onnx", "onnxruntime") == set()
    assert methods == set()


@pytest.mark.parametrize("module", ["fleetdistill_server.cli.app", "fleetdistill_server.service.supervisor"])
def test_commands_start_without_torch(module: str) -> None:
    assert of_packages(loaded_by(f"import {module}"), "torch", "torchvision", "onnx", "onnxruntime") == set()
