"""The server halves of all methods, each in a file or folder of the method's name; `register` adds your own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_class, device_class, is_registered, known_methods
from fleetdistill.methods.outside import installed_methods, note_registration
from fleetdistill.models import module_name
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    from fleetdistill_server.methods.base import ServerMethod

__all__ = ["SERVER_METHODS", "modules_of", "register", "server_class"]

SERVER_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "cdkt": "cdkt:CDKTServer",
        "classstats": "classstats.refining:RefiningServer",
        "classstats_private": "classstats_private.server:ClassStatsPrivateServer",
        "classstats_secure": "classstats_secure.secure:ClassStatsSecureServer",
        "classstats_summed": "classstats_secure.summed:ClassStatsSummedServer",
        "dafkd": "dafkd.server:DaFKDServer",
        "fedavg": "fedavg:FedAvgServer",
        "fedd2s": "fedd2s.server:FedD2SServer",
        "feddkc": "feddkc.server:FedDKCServer",
        "feddkd": "feddkd:FedDKDServer",
    }
)
"""Server half of each built-in method, as `module:class`."""

registered: dict[str, type[ServerMethod]] = {}
_REQUIRED = ("summary", "exchanges", "round", "state_dict", "load_state_dict")
"""Members of a server half that `ServerMethod` does not define, or defines only to document them."""


def register(method: str, server: type[ServerMethod]) -> None:
    """Registers the server half of your own method for this process.

    Register its configuration and device half with `fleetdistill.methods.register` in the same process: the server
    checks run.toml with the configuration.

    Raises:
        ConfigurationError: Another method has this name, or the class lacks a member that each server half defines.
    """
    if missing := [name for name in _REQUIRED if _is_missing(server, name)]:
        raise ConfigurationError(
            f"{server.__name__}, the server half of method {method!r}, lacks {', '.join(missing)}; define what "
            "fleetdistill_server.methods.base.ServerMethod says of it"
        )
    if method in SERVER_METHODS or registered.get(method, server) is not server:
        raise ConfigurationError(f"method {method!r} is already registered; register yours under another name")
    registered[method] = server
    note_registration(server)


def _is_missing(server: type[ServerMethod], name: str) -> bool:
    from fleetdistill_server.methods.base import ServerMethod  # loads torch

    return next((owner for owner in server.__mro__ if name in vars(owner)), ServerMethod) is ServerMethod


def server_class(method: str) -> type[ServerMethod]:
    """Returns the class of a method's server half. Raises ConfigurationError for an unknown method."""
    has_device_half = is_registered(method)  # also imports the installed package that declares the method, if any
    if method in registered:
        return registered[method]
    if has_device_half:
        raise ConfigurationError(
            f"method {method!r} has no server half: the module that registers its device half must also call "
            f"fleetdistill_server.methods.register({method!r}, ...)"
        )
    if method not in SERVER_METHODS:
        raise ConfigurationError(unknown_name("method", method, sorted({*known_methods(), *registered})))
    module, name = SERVER_METHODS[method].split(":")
    return getattr(import_module(f"fleetdistill_server.methods.{module}"), name)  # type: ignore[no-any-return]


def modules_of(method: str) -> list[str]:
    """Returns the modules that another process must import to use a method that was registered in this process.

    The list is empty for built-in methods and for methods of installed packages.

    Raises:
        ConfigurationError: The method was defined in an interactive session.
    """
    if method not in registered or method in installed_methods():
        return []
    halves = (registered[method], config_class(method), device_class(method))
    return list(dict.fromkeys(module_name(half.__module__) for half in halves))
