"""The table of methods, server side. Each is a file of its name with the server half."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from fleetdistill.errors import ConfigurationError

if TYPE_CHECKING:
    from fleetdistill_server.methods.base import ServerMethod

SERVER_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "cdkt": "CDKTServer",
        "dafkd": "DaFKDServer",
        "fedavg": "FedAvgServer",
        "fedd2s": "FedD2SServer",
        "feddkc": "FedDKCServer",
        "feddkd": "FedDKDServer",
    }
)
"""Name of a method, and its server half in the file of that name."""


def server_class(method: str) -> type[ServerMethod]:
    """The server half of a method. Raises ConfigurationError for an unknown one."""
    if method not in SERVER_METHODS:
        raise ConfigurationError(f"unknown method {method!r}, expected one of {', '.join(sorted(SERVER_METHODS))}")
    module = import_module(f"fleetdistill_server.methods.{method}")
    return getattr(module, SERVER_METHODS[method])  # type: ignore[no-any-return]
