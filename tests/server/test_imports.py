"""Who may load what: devices stay light, the front knows no method, and the SDK never reaches for the server."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support.processes import python

import fleetdistill

SDK = Path(fleetdistill.__file__).parent
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
    loaded = loaded_by("import fleetdistill")
    assert of_packages(loaded, *HEAVY) == set()
    assert "fleetdistill.device.device" in loaded


def test_a_device_reaches_its_server_without_torch() -> None:
    loaded = loaded_by(
        "import fleetdistill.link.grpc_link, fleetdistill.link.downloads, fleetdistill.state.directory;"
        "import fleetdistill.device.consent"
    )
    assert of_packages(loaded, *HEAVY) == set()


def test_the_front_knows_neither_torch_nor_methods() -> None:
    loaded = loaded_by("import fleetdistill_server.front")
    methods = of_packages(loaded, "fleetdistill.methods", "fleetdistill_server.methods")
    assert of_packages(loaded, "torch", "torchvision", "onnx", "onnxruntime") == set()
    assert methods == set()


@pytest.mark.parametrize("module", ["fleetdistill_server.cli.app", "fleetdistill_server.service.supervisor"])
def test_commands_start_without_torch(module: str) -> None:
    assert of_packages(loaded_by(f"import {module}"), "torch", "torchvision", "onnx", "onnxruntime") == set()


def test_the_sdk_never_imports_the_server() -> None:
    files = sorted(SDK.rglob("*.py"))
    assert len(files) > 20
    offenders = {
        str(file.relative_to(SDK)): sorted(of_packages(_imports(file), "fleetdistill_server")) for file in files
    }
    assert {name: found for name, found in offenders.items() if found} == {}


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names.add(node.value)  # import_module("...")
    return names
