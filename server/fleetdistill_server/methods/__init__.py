"""The table of methods, server side. Each is a file or a folder of its name; `register` adds your own."""

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
        "cdkt": "cdkt:CDKTServer",
        "classstats": "classstats.server:ClassStatsServer",
        "dafkd": "dafkd.server:DaFKDServer",
        "fedavg": "fedavg:FedAvgServer",
        "fedd2s": "fedd2s.server:FedD2SServer",
        "feddkc": "feddkc.server:FedDKCServer",
        "feddkd": "feddkd:FedDKDServer",
    }
)
"""Each built-in method: where its server half is, as `module:class`."""

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
    module, name = SERVER_METHODS[method].split(":")
    return getattr(import_module(f"fleetdistill_server.methods.{module}"), name)  # type: ignore[no-any-return]
