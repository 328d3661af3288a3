"""The table of methods, device side. Each is a file or a folder of its name, with a configuration and a device half.

A method of others comes from `register`, which an app or its modules call, or from an installed package that declares
it (`fleetdistill.methods.outside`). A contract only names a method, so a server can never make a device import code
that is not installed there for this purpose.
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

__all__ = ["METHODS", "config_class", "device_class", "is_registered", "known_methods", "register"]

METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cdkt": ("cdkt.config:CDKTConfig", "cdkt.device:CDKTDevice"),
        "classstats": ("classstats.config:ClassStatsConfig", "classstats.device:ClassStatsDevice"),
        "dafkd": ("dafkd.config:DaFKDConfig", "dafkd.device:DaFKDDevice"),
        "fedavg": ("fedavg:FedAvgConfig", "fedavg:FedAvgDevice"),
        "fedd2s": ("fedd2s.config:FedD2SConfig", "fedd2s.device:FedD2SDevice"),
        "feddkc": ("feddkc.config:FedDKCConfig", "feddkc.device:FedDKCDevice"),
        "feddkd": ("feddkd.config:FedDKDConfig", "feddkd.device:FedDKDDevice"),
    }
)
"""Each built-in method: where its configuration and its device half are, as `module:class`."""

registered: dict[str, tuple[type[Any], type[DeviceMethod]]] = {}


def register(method: str, config: type[Any], device: type[DeviceMethod]) -> None:
    """Adds a method of the app's own to this process; `fleetdistill_server.methods.register` adds its server half.

    Args:
        method: Its name in run.toml and in the contract.
        config: A frozen dataclass of settings that inherits `LocalTraining`, which has what else is asked of it.
        device: Its device half.

    Raises:
        ConfigurationError: Another method has the name, or the configuration inherits something else.
    """
    if not issubclass(config, LocalTraining):
        raise ConfigurationError(
            f"the configuration of method {method!r}, {config.__name__}, is no LocalTraining, which the rest of the "
            "system asks about rounds and rates; let it inherit fleetdistill.methods.local.LocalTraining"
        )
    if method in METHODS or registered.get(method, (config, device)) != (config, device):
        raise ConfigurationError(f"there is a method {method!r} already; register yours under another name")
    registered[method] = (config, device)
    note_registration(device)
    note_registration(config)


def known_methods() -> list[str]:
    """Names of all methods that this process can have: built-in, registered, and of installed packages; sorted."""
    return sorted({*METHODS, *registered, *installed_methods()})


def is_registered(method: str) -> bool:
    """Whether a method from outside is registered, after a look at the installed packages.

    Raises:
        ConfigurationError: An installed package declares it and does not register it.
    """
    if method not in METHODS and method not in registered:
        load_installed(method, registered.__contains__)
    return method in registered


def config_class(method: str, settings: Mapping[str, Any] | None = None) -> type[Any]:
    """The configuration class of a method, of the form that some settings choose.

    Args:
        method: Its name.
        settings: What is given of its settings; without them the method's usual form.

    Raises:
        ConfigurationError: The method is unknown, or it has no such form.
    """
    usual: type[LocalTraining] = _half(method, 0)
    return usual.form(settings or {})


def device_class(method: str, config: Any = None) -> type[DeviceMethod]:
    """The device half of a method, of the configuration's form. Raises ConfigurationError for an unknown method."""
    usual: type[DeviceMethod] = _half(method, 1)
    return usual if config is None else usual.form(config)


def config_to_plan(config: Any) -> Plan:
    """A configuration as it travels in the contract; settings that are None stay out."""
    return Plan(values={name: value for name, value in asdict(config).items() if value is not None})


def config_from_plan(method: str, plan: Plan) -> Any:
    """The configuration that a contract carries, by the constructor: the server has spelled every setting out.

    Raises:
        ConfigurationError: The contract has settings that this SDK does not know.
    """
    try:
        return config_class(method, plan.values)(**plan.values)
    except TypeError as error:
        raise ConfigurationError(
            f"the contract's settings of {method} do not fit this SDK: {error}; update it"
        ) from error


def config_of_contract(contract: contract_pb2.Contract) -> Any:
    """The configuration of a run, held against its number of classes too.

    Raises:
        ConfigurationError: The method or a setting is unknown here, or a value is out of its range.
    """
    found = config_from_plan(contract.method, Plan.read(contract.config))
    found.for_classes(len(contract.classes))
    return found


def _half(method: str, half: int) -> Any:
    if is_registered(method):
        return registered[method][half]
    if method not in METHODS:
        raise ConfigurationError(unknown_name("method", method, known_methods()))
    module, name = METHODS[method][half].split(":")
    return getattr(import_module(f"fleetdistill.methods.{module}"), name)
