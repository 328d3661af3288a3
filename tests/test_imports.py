"""What a process loads: devices stay light, and the front knows no method. And what tests import.

What a file may import, import-linter holds (pyproject.toml, `make check`).
"""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import free_port, python

ROOT = Path(__file__).parents[1]
HEAVY = (
    *("torch", "torchvision", "onnx", "onnxruntime", "pydantic", "typer", "rich"),
    *("safetensors", "sqlite_utils", "fleetdistill_server"),
)


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after running code."""
    return set(json.loads(python(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")))


def of_packages(modules: set[str], *packages: str) -> set[str]:
    return {
        module
        for module in modules
        if any(module == package or module.startswith(f"{package}.") for package in packages)
    }


@pytest.mark.long
def test_every_benchmark_can_be_imported() -> None:
    """A renamed function of ours would otherwise be found when somebody measures."""
    folders = [ROOT / "benchmarks", ROOT / "benchmarks" / "experiments", ROOT / "examples"]
    names = sorted(path.stem for folder in folders[:2] for path in folder.glob("*.py"))
    assert len(names) > 40
    code = "import importlib, sys\n"
    code += f"sys.path[:0] = {[str(folder) for folder in folders]}\n"
    code += f"for name in {names}:\n    importlib.import_module(name)\n"
    python(code)


def test_a_device_is_light_to_import() -> None:
    loaded = loaded_by("from fleetdistill import *")
    assert of_packages(loaded, *HEAVY) == set()
    assert "fleetdistill.device.device" in loaded


def test_importing_device_loads_only_what_an_idle_device_needs() -> None:
    loaded = loaded_by("from fleetdistill import Device")
    unneeded = ("fleetdistill.knowledge", "fleetdistill.methods", "fleetdistill.training", "fleetdistill.compute")
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


ANNEXES = ("fleetdistill_console", "fleetdistill_lab")
SERVE = """
import json, sys
from fleetdistill_server.start import main
sys.argv = ["fleetdistill", "serve", "server.toml"]
try:
    main()
except SystemExit:
    print(json.dumps([name for name in sys.modules if name.startswith("fleetdistill_")]))
"""


@pytest.mark.parametrize("module", ["front.process", "engine.process"])
def test_front_and_engine_load_no_annex(module: str) -> None:
    assert of_packages(loaded_by(f"import fleetdistill_server.{module}"), *ANNEXES) == set()


@pytest.mark.slow
@pytest.mark.cold_start
@pytest.mark.parametrize("metrics", [pytest.param(False, marks=pytest.mark.long), True])
def test_serve_loads_no_annex_but_metrics(tmp_path: Path, metrics: bool) -> None:
    lines = ["[server]", "store = 'store'", "listen = '127.0.0.1:0'", "torch_device = 'cpu'"]
    lines += [f"metrics = '127.0.0.1:{free_port()}'"] if metrics else []
    (tmp_path / "server.toml").write_text("\n".join(lines))
    process = subprocess.Popen([sys.executable, "-c", SERVE], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "press Ctrl-C" in line:
            process.send_signal(signal.SIGTERM)
            break
    loaded = of_packages(set(json.loads(process.communicate()[0].splitlines()[-1])), *ANNEXES)
    assert loaded - of_packages(loaded, "fleetdistill_console.metrics") == (
        {"fleetdistill_console"} if metrics else set()
    )


def imported_by(file: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return modules | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.long
def test_no_file_imports_from_a_test_file() -> None:
    """What tests share is in the folder that uses it, or in tests/support for several folders."""
    tests = Path(__file__).parent
    result = {
        f"{file.relative_to(tests)}: {module}"
        for file in tests.rglob("*.py")
        for module in imported_by(file)
        if module.rpartition(".")[2].startswith("test_") and not module.startswith("fleetdistill")
    }
    assert result == set()
