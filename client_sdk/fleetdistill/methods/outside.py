"""Methods that are not built in: from installed packages, and from modules that an operator or an app names.

An installed package declares a method as an entry point:

    [project.entry-points."fleetdistill.methods"]
    proximal = "my_package.own_method"

The name is the method's name. The value is a module that calls `register`, or a function that does. It is imported
when this process needs a method of exactly that name. A contract contains only the method's name, so a server can
select among the methods that are installed on a device, but cannot make the device import other code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from fleetdistill.errors import ConfigurationError
from fleetdistill.printable import printable

__all__ = ["import_modules"]

GROUP = "fleetdistill.methods"
"""Entry-point group of methods."""

registrations: list[str] = []
"""Module of each device half, server half and configuration registered in this process, in order."""
imported: set[str] = set()
"""Modules whose import by `import_modules` has registered a method."""


def note_registration(half: type) -> None:
    """Records the registration of a class, so that `import_modules` can check that a module registers a method."""
    registrations.append(half.__module__)


def installed_methods() -> list[str]:
    """Returns the sorted names of the methods that installed packages declare, without importing any of them."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_installed(method: str, is_registered: Callable[[str], bool]) -> None:
    """Imports the installed package that declares a method, which registers it; does nothing if no package does.

    Args:
        method: Name of the method, exactly as the package declares it.
        is_registered: Returns whether a method of a given name is registered.

    Raises:
        ConfigurationError: Several packages declare the method, or its package cannot be imported or does not register
            it.
    """
    result = {point.value: point for point in entry_points(group=GROUP, name=method)}
    if len(result) > 1:
        packages = ", ".join(sorted(_package(item) for item in result.values()))
        raise ConfigurationError(f"several packages declare method {method!r} ({packages}); uninstall all but one")
    for declared in result.values():
        _load(declared)
        if not is_registered(method):
            raise ConfigurationError(
                f"{_package(declared)} declares method {method!r} as {declared.value!r}, which registers no method of "
                f"that name; it must call fleetdistill.methods.register({method!r}, ...)"
            )


def _load(declared: EntryPoint) -> None:
    try:
        loaded = declared.load()
        if callable(loaded):
            loaded()
    except Exception as error:  # another author's package may raise anything
        raise ConfigurationError(
            f"method {declared.name!r} of {_package(declared)}: cannot load {declared.value!r}: {_describe(error)}; "
            "update or uninstall the package"
        ) from error


def _package(declared: EntryPoint) -> str:
    return f"package {declared.dist.name!r}" if declared.dist is not None else "an installed package"


def import_modules(modules: Iterable[str], setting: str) -> None:
    """Imports modules that register methods.

    Importing a module runs its code: take names only from local configuration, never from a received message.

    Args:
        modules: Names as in `import`, such as `my_package.own_method`.
        setting: The setting that names the modules, for error messages.

    Raises:
        ConfigurationError: A module cannot be imported, or does not register a method.
    """
    names = list(modules)
    for name in names:
        _import(name, setting)
    for name in names:
        own = (
            sys.modules.get(registration) is sys.modules[name] or registration.startswith(f"{name}.")
            for registration in registrations
        )
        if name not in imported and not any(own):
            raise ConfigurationError(
                f"{setting}: module {name!r} registers no method; call fleetdistill.methods.register and "
                "fleetdistill_server.methods.register at its top level"
            )


def _import(name: str, setting: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(
            f"{setting}: {name!r} is not a module name; write it as in Python's import, package.module"
        )
    before = len(registrations)
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{setting}: cannot import {name!r}: {_describe(error)}; install its package, or run the command in the "
            "folder that contains it"
        ) from error
    except ConfigurationError as error:  # of a registration, which says what to do
        raise ConfigurationError(f"{setting}: {name!r}: {error}") from error
    except Exception as error:  # another author's module may raise anything
        raise ConfigurationError(f"{setting}: cannot import {name!r}: {_describe(error)}") from error
    if len(registrations) > before:
        imported.add(name)


def _describe(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}").strip()
