"""The table of methods, device side: the configuration and the device half of each.

A built-in method is a folder of the same name, which contains `config.py` and `device.py`. An app adds a method with
`register`, or installs a package that declares one (`fleetdistill.methods.outside`). A contract contains only the
method's name, so a server cannot make a device import other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Plan
from fleetdistill.methods.local import LocalTraining
from fleetdistill.methods.outside import installed_methods, load_installed, note_registration
from fleetdistill.names import unknown_name

if TYPE_CHECKING:
    from fleetdistill.methods.base import DeviceMethod
    from fleetdistill.wire.v1 import contract_pb2

__all__ = ["METHODS", "config_class", "device_class", "example_config", "is_registered", "known_methods", "register"]

METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cdkt": ("cdkt.config:CDKTConfig", "cdkt.device:CDKTDevice"),
        "classstats": ("classstats.config:ClassStatsConfig", "classstats.device:RefiningDevice"),
        "classstats_private": (
            "classstats_private.config:ClassStatsPrivateConfig",
            "classstats_private.device:ClassStatsPrivateDevice",
        ),
        "classstats_secure": (
            "classstats_secure.config:ClassStatsSecureConfig",
            "classstats_secure.device:ClassStatsSecureDevice",
        ),
        "classstats_summed": (
            "classstats_secure.config:ClassStatsSummedConfig",
            "classstats_secure.device:ClassStatsSummedDevice",
        ),
        "dafkd": ("dafkd.config:DaFKDConfig", "dafkd.device:DaFKDDevice"),
        "fedavg": ("fedavg.config:FedAvgConfig", "fedavg.device:FedAvgDevice"),
        "fedd2s": ("fedd2s.config:FedD2SConfig", "fedd2s.device:FedD2SDevice"),
        "feddkc": ("feddkc.config:FedDKCConfig", "feddkc.device:FedDKCDevice"),
        "feddkd": ("feddkd.config:FedDKDConfig", "feddkd.device:FedDKDDevice"),
    }
)
"""Configuration and device half of each built-in method, as `module:class`."""

registered: dict[str, tuple[type[Any], type[DeviceMethod]]] = {}


def register(method: str, config: type[Any], device: type[DeviceMethod]) -> None:
    """Registers a method for this process; `fleetdistill_server.methods.register` registers its server half.

    Args:
        method: Name in run.toml and in the contract.
        config: Frozen dataclass of the method's settings; a subclass of `LocalTraining`.
        device: Device half.

    Raises:
        ConfigurationError: The name belongs to another method, or `config` is not a subclass of `LocalTraining`.
    """
    if not issubclass(config, LocalTraining):
        raise ConfigurationError(
            f"{config.__name__}, the configuration of method {method!r}, is not a LocalTraining; let it inherit "
            "fleetdistill.methods.local.LocalTraining, which defines the settings that all methods share"
        )
    if method in METHODS or registered.get(method, (config, device)) != (config, device):
        raise ConfigurationError(f"method {method!r} is already registered; register yours under another name")
    registered[method] = (config, device)
    note_registration(device)
    note_registration(config)


def known_methods() -> list[str]:
    """Returns the sorted names of the built-in and registered methods and of those that installed packages declare."""
    return sorted({*METHODS, *registered, *installed_methods()})


def is_registered(method: str) -> bool:
    """Returns whether a method that is not built in is registered; loads the installed package that declares it.

    Raises:
        ConfigurationError: An installed package declares the method and does not register it.
    """
    if method not in METHODS and method not in registered:
        load_installed(method, registered.__contains__)
    return method in registered


def config_class(method: str) -> type[Any]:
    """Returns the configuration class of a method. Raises ConfigurationError if the method is unknown."""
    result: type[LocalTraining] = _half(method, 0)
    return result


def example_config(method: str, **settings: Any) -> Any:
    """Returns a method's configuration with its defaults, and the class's examples for settings that have none.

    Args:
        method: Name of the method.
        settings: Settings with another value.

    Raises:
        ConfigurationError: The method is unknown, or a value is out of its range.
        TypeError: A setting is unknown.
    """
    result = config_class(method)
    return result.from_settings({**result.examples, **settings})


def device_class(method: str) -> type[DeviceMethod]:
    """Returns the device half of a method. Raises ConfigurationError if the method is unknown."""
    half: type[DeviceMethod] = _half(method, 1)
    return half


def config_to_plan(config: Any) -> Plan:
    """Returns the contract's form of a configuration; settings that are None are omitted."""
    return Plan(values={name: value for name, value in asdict(config).items() if value is not None})


def config_from_plan(method: str, plan: Plan) -> Any:
    """Returns the configuration in a contract, in which the server has set every setting explicitly.

    Raises:
        ConfigurationError: The contract has a setting that this SDK does not support, or a value out of its range.
    """
    try:
        return config_class(method)(**plan.values)
    except TypeError as error:
        raise ConfigurationError(
            f"the contract's settings of {method} do not fit this SDK: {error}; update it"
        ) from error


def config_of_contract(contract: contract_pb2.Contract) -> Any:
    """Returns the configuration in a contract after checking it against the contract's number of classes.

    Raises:
        ConfigurationError: The SDK does not support the method or a setting, or a value is out of its range.
    """
    result = config_from_plan(contract.method, Plan.read(contract.config))
    result.for_classes(len(contract.classes))
    return result


def _half(method: str, half: int) -> Any:
    if is_registered(method):
        return registered[method][half]
    if method not in METHODS:
        advice = "import the module that registers your own method first"
        raise ConfigurationError(f"{unknown_name('method', method, known_methods())}; {advice}")
    module, name = METHODS[method][half].split(":")
    return getattr(import_module(f"fleetdistill.methods.{module}"), name)
