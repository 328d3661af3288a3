"""The table of methods, server side. Each is a file of its name with a server half; `register` adds your own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    from fleetdistill_server.methods.base import ServerMethod

SERVER_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "cdkt": "CDKTServer",
        "classstats": "ClassStatsServer",
        "dafkd": "DaFKDServer",
        "fedavg": "FedAvgServer",
        "fedd2s": "FedD2SServer",
        "feddkc": "FedDKCServer",
        "feddkd": "FedDKDServer",
    }
)
"""Name of a method that comes along, and its server half in the file of that name."""

_registered: dict[str, type[ServerMethod]] = {}


def register(method: str, server: type[ServerMethod]) -> None:
    """Adds the server half of a method of your own to this process; its configuration and device half go to
    `fleetdistill.methods.register`, here too, because the server checks run.toml with the configuration.

    Raises:
        ConfigurationError: Another method has the name.
    """
    if method in SERVER_METHODS or _registered.get(method, server) is not server:
        raise ConfigurationError(f"there is a method {method!r} already; register yours under another name")
    _registered[method] = server


def server_class(method: str, config: Any = None) -> type[ServerMethod]:
    """The server half of a method, of the configuration's form. Raises ConfigurationError for an unknown method."""
    usual = _usual_class(method)
    return usual if config is None else usual.form(config)


def _usual_class(method: str) -> type[ServerMethod]:
    if method in _registered:
        return _registered[method]
    if method not in SERVER_METHODS:
        raise ConfigurationError(unknown_name("method", method, sorted({*SERVER_METHODS, *_registered})))
    module = import_module(f"fleetdistill_server.methods.{method}")
    return getattr(module, SERVER_METHODS[method])  # type: ignore[no-any-return]
