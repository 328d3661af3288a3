"""Checks of single arguments, which raise ConfigurationError with the name, the value and what was expected."""

from __future__ import annotations

from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import NAME_RULE, is_name


def check_type(name: str, value: object, expected: type | tuple[type, ...], text: str) -> None:
    """Raises ConfigurationError unless `value` is of an expected type; `text` describes what is expected."""
    if not isinstance(value, expected):
        raise ConfigurationError(f"{name} is {shown(value)}, expected {text}")


def check_flag(name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is a bool."""
    check_type(name, value, bool, "True or False")


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Raises ConfigurationError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} is {shown(value)}, expected an integer of at least {least}")
    if value < least:
        raise ConfigurationError(f"{name} is {value}, must be at least {least}")


def check_number(name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is an integer or a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} is {shown(value)}, expected a number")


def check_function(name: str, value: object, takes: str) -> None:
    """Raises ConfigurationError unless `value` can be called; `takes` describes its arguments."""
    if not callable(value):
        raise ConfigurationError(f"{name} is {shown(value)}, expected a function {takes}")


def check_name(name: str, value: object) -> None:
    """Raises ConfigurationError unless `value` is a valid name of a device or a run."""
    if not isinstance(value, str) or not is_name(value):
        raise ConfigurationError(f"{name} is {shown(value)}, must be {NAME_RULE}")


def check_address(name: str, value: str) -> None:
    """Raises ConfigurationError unless `value` is `host:port`."""
    host, _, port = value.rpartition(":")
    plain = (host.startswith("[") and host.endswith("]")) or not set(host) & set(":/@ ")
    if not (host and plain and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigurationError(
            f"{name} is {shown(value)}, expected host:port with a port from 1 to 65535, such as 127.0.0.1:50051"
        )


def shown(value: Any) -> str:
    """Returns a value for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
