"""What the packages export can be imported, is documented, and is all that examples and pages use."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import python

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "client_sdk" / "fleetdistill", *(ROOT / "server").glob("fleetdistill_*"))


def module_name(path: Path) -> str:
    package = next(item for item in PACKAGES if path.is_relative_to(item))
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def has_all(path: Path) -> bool:
    return re.search(r"^__all__ = ", path.read_text(), re.MULTILINE) is not None


PUBLIC = sorted(module_name(path) for package in PACKAGES for path in package.rglob("*.py") if has_all(path))


def uses() -> Iterator[tuple[str, str, str]]:
    """Page or example, module and name of each import from our packages in what people copy."""
    pages = [path for folder in (ROOT, ROOT / "client_sdk", ROOT / "server") for path in folder.glob("*.md")]
    for path in [*pages, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text()
        blocks = (
            re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if path.suffix == ".md" else [text]
        )
        for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
            if isinstance(node, ast.ImportFrom) and re.match(r"fleetdistill(?:_\w+)?(?:\.|$)", node.module or ""):
                yield from ((str(path.relative_to(ROOT)), node.module or "", name.name) for name in node.names)


USES = sorted(set(uses()))


def test_the_folders_of_the_sdk_have_public_names() -> None:
    folders = {"", ".device", ".knowledge", ".compute", ".link", ".methods", ".models", ".testing", ".training"}
    assert {f"fleetdistill{folder}" for folder in folders} <= set(PUBLIC)


def test_server_folders_for_code_of_others_have_public_names() -> None:
    folders = {"", ".methods", ".testing"}
    assert {"fleetdistill_lab", *(f"fleetdistill_server{folder}" for folder in folders)} <= set(PUBLIC)


def test_importing_server_loads_no_torch_or_pydantic_before_use() -> None:
    code = """
import sys, fleetdistill_server, fleetdistill_lab.simulation
print(*sorted({"torch", "pydantic"} & sys.modules.keys()))
fleetdistill_lab.Simulation
print("pydantic" in sys.modules, {*fleetdistill_lab.__all__} <= {*dir(fleetdistill_lab)})
"""
    path = os.pathsep.join({str(item.parent): None for item in PACKAGES})
    assert python(code, {"PYTHONPATH": path}).splitlines() == ["", "True True"]


@pytest.mark.parametrize("name", PUBLIC)
def test_exported_names_are_importable_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    assert not hasattr(module, "absent")
    for item in module.__all__:
        result = getattr(module, item)
        if inspect.isclass(result) or inspect.isroutine(result):
            assert inspect.getdoc(result), f"{name}.{item} has no docstring"


@pytest.mark.parametrize(("page", "module", "name"), USES)
def test_what_people_copy_uses_public_names(page: str, module: str, name: str) -> None:
    if f"{module}.{name}" not in PUBLIC:
        assert module in PUBLIC, f"{page} imports {name} from {module}, which has no __all__"
        assert name in importlib.import_module(module).__all__, f"{page}: {module}.{name} is not public"
