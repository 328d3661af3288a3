"""Methods from outside for tests: a process that knows none yet, modules on its path, and installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetdistill import methods
from fleetdistill.methods import outside
from fleetdistill_server import methods as server_methods

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def fresh_process(*modules: str) -> Iterator[pytest.MonkeyPatch]:
    """No method from outside is registered inside, whatever earlier tests imported, and none of it stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "registered", {})
        patch.setattr(server_methods, "registered", {})
        patch.setattr(outside, "registrations", [])
        patch.setattr(outside, "imported", set())
        for module in (*modules, *_baselines()):
            patch.delitem(sys.modules, module, raising=False)
        try:
            yield patch
        finally:
            for module in (*modules, *_baselines()):
                sys.modules.pop(module, None)


def _baselines() -> list[str]:
    """The modules of the lab's methods that are imported now."""
    return [name for name in sys.modules if name.startswith("fleetdistill_lab.baselines.")]


def write_module(folder: Path, name: str, text: str) -> None:
    """A module that is found once `folder` is on the path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def install(folder: Path, package: str, methods: Mapping[str, str]) -> None:
    """An installed package that declares methods, as pip leaves it in site-packages."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in methods.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{outside.GROUP}]", *lines, ""]))
