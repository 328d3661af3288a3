"""The table of methods, device side. Each is a file of its name with a configuration and a device half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Plan

if TYPE_CHECKING:
    from fleetdistill.methods.base import DeviceMethod

METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cdkt": ("CDKTConfig", "CDKTDevice"),
        "dafkd": ("DaFKDConfig", "DaFKDDevice"),
        "fedavg": ("FedAvgConfig", "FedAvgDevice"),
        "fedd2s": ("FedD2SConfig", "FedD2SDevice"),
        "feddkc": ("FedDKCConfig", "FedDKCDevice"),
        "feddkd": ("FedDKDConfig", "FedDKDDevice"),
    }
)
"""Name of a method, and its configuration and device half in the file of that name."""


def config_class(method: str) -> type[Any]:
    """The configuration class of a method. Raises ConfigurationError for an unknown one."""
    return getattr(_module(method), METHODS[method][0])  # type: ignore[no-any-return]


def device_class(method: str) -> type[DeviceMethod]:
    """The device half of a method. Raises ConfigurationError for an unknown one."""
    return getattr(_module(method), METHODS[method][1])  # type: ignore[no-any-return]


def config_to_plan(config: Any) -> Plan:
    """A configuration as it travels in the contract; settings that are None stay out."""
    return Plan(values={name: value for name, value in asdict(config).items() if value is not None})


def config_from_plan(method: str, plan: Plan) -> Any:
    """The configuration that a contract carries, by the constructor: the server has spelled every setting out.

    Raises:
        ConfigurationError: The contract has settings that this SDK does not know.
    """
    try:
        return config_class(method)(**plan.values)
    except TypeError as error:
        raise ConfigurationError(
            f"the contract's settings of {method} do not fit this SDK: {error}; update it"
        ) from error


def _module(method: str) -> Any:
    if method not in METHODS:
        raise ConfigurationError(f"unknown method {method!r}, expected one of {', '.join(sorted(METHODS))}")
    return import_module(f"fleetdistill.methods.{method}")
