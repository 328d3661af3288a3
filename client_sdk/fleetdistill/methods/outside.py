"""Methods from outside this package: those of installed packages, and modules that an operator or an app names.

An installed package declares a method as an entry point:

    [project.entry-points."fleetdistill.methods"]
    fedprox = "my_package.fedprox"

The name is the method's; the value is a module that calls `register`, or a function in one that does. It is imported
when this process needs a method of exactly that name. A contract only names a method, so a server chooses among what
is installed on a device, and can never make it import anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from fleetdistill.errors import ConfigurationError
from fleetdistill.printable import printable

GROUP = "fleetdistill.methods"
"""The entry points' group."""

registrations: list[str] = []
"""Module of each half that was registered in this process, server halves included."""
imported: set[str] = set()
"""Modules that have registered something while `import_modules` imported them."""


def note_registration(half: type) -> None:
    """Notes that a class was registered, for `import_modules` to see."""
    registrations.append(half.__module__)


def installed_methods() -> list[str]:
    """Names of the methods that installed packages declare, sorted; nothing is imported."""
    return sorted({one.name for one in entry_points(group=GROUP)})


def load_installed(method: str, is_registered: Callable[[str], bool]) -> None:
    """Imports the installed package that declares a method, if one does; it registers the method.

    Args:
        method: Exactly as a package declares it.
        is_registered: Whether a method of a name is registered by now.

    Raises:
        ConfigurationError: Several packages declare it, or the one that does cannot be imported or registers something
            else.
    """
    found = {one.value: one for one in entry_points(group=GROUP, name=method)}
    if len(found) > 1:
        packages = ", ".join(sorted(_package(one) for one in found.values()))
        raise ConfigurationError(f"several packages declare method {method!r} ({packages}); uninstall all but one")
    for declared in found.values():
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
    except Exception as error:  # a package of others may fail in any way
        raise ConfigurationError(
            f"method {declared.name!r} of {_package(declared)}: cannot load {declared.value!r}: {_describe(error)}; "
            "update or uninstall the package"
        ) from error


def _package(declared: EntryPoint) -> str:
    return f"package {declared.dist.name!r}" if declared.dist is not None else "an installed package"


def import_modules(modules: Iterable[str], setting: str) -> None:
    """Imports modules that register methods. This runs their code: take names from your own configuration only, never
    from the other end of a link.

    Args:
        modules: As in `import`, such as `my_package.fedprox`.
        setting: What named them, for messages.

    Raises:
        ConfigurationError: A module cannot be imported, or registers nothing.
    """
    names = list(modules)
    for name in names:
        _import(name, setting)
    for name in names:
        own = (sys.modules.get(one) is sys.modules[name] or one.startswith(f"{name}.") for one in registrations)
        if name not in imported and not any(own):
            raise ConfigurationError(
                f"{setting}: module {name!r} registers no method; call fleetdistill.methods.register and "
                "fleetdistill_server.methods.register at its top level"
            )


def _import(name: str, setting: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{setting}: {name!r} is no module; name one as in Python's import, package.module")
    before = len(registrations)
    try:
        import_module(name)
    except Exception as error:  # a module of others may fail in any way
        raise ConfigurationError(
            f"{setting}: cannot import {name!r}: {_describe(error)}; install its package, or run the command in the "
            "folder that has it"
        ) from error
    if len(registrations) > before:
        imported.add(name)


def _describe(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}").strip()
