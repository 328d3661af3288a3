"""Processes in which packages are not installed, as far as Python can tell; so are the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

from support.processes import module_path

_CODE = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {packages!r} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a process without these packages; `folder` gets the module that hides them."""
    (folder / "sitecustomize.py").write_text(_CODE.format(packages=packages))
    path = os.pathsep.join([str(folder), *module_path().values()])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
