"""Imports on first use: exported names of a package, and modules that only some processes load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["lazy_exports"]


def get_loaded(name: str) -> ModuleType | None:
    """Returns a module that this process has imported, else None.

    Waits while another thread imports it: until then `sys.modules` has a module without most of its names.
    """
    return None if sys.modules.get(name) is None else import_module(name)


def lazy_exports(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
        package: `__name__` of the package.
        where: For each exported name, its module, or `module:name` if the name differs there.
    """

    def found(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = where[name].partition(":")
        return getattr(import_module(module), attribute or name)

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *where})

    return found, names
