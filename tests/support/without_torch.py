"""A process in which importing some packages fails, as where they are not installed. Imports nothing itself."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

TORCH = ("torch", "torchvision", "onnx", "safetensors", "fleetdistill_server")


class _Blocked(importlib.abc.MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"{fullname} is blocked", name=fullname)


def block(*packages: str) -> None:
    """From now on these cannot be imported."""
    sys.meta_path.insert(0, _Blocked(packages))
