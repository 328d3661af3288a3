"""Devices from options without their groups, so that a test names and changes only those that it is about."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fleetdistill import Budgets, Deployment, Device, Runtime, Server, Splits, TorchModel

_GROUPS: dict[str, Any] = {
    "server": Server,
    "data": Splits,
    "model": TorchModel,
    "budgets": Budgets,
    "deployment": Deployment,
    "runtime": Runtime,
}


def grouped(**options: Any) -> dict[str, Any]:
    """The arguments of `Device` for options of it and of its groups: `run="digits"` goes into `Server`."""
    for name, group in _GROUPS.items():
        known = {field.name for field in fields(group)} - {"address", "data", "module"}
        chosen = {option: options.pop(option) for option in known & options.keys()}
        if chosen:
            options[name] = _with_options(options.get(name), group, chosen)
    return options


def _with_options(value: Any, group: Any, chosen: dict[str, Any]) -> Any:
    if isinstance(value, group):
        return replace(value, **chosen)
    if group in (Budgets, Deployment, Runtime):
        return group(**chosen) if value is None else value  # a wrong value stays for the test of its refusal
    return group(value, **chosen) if value is not None or any(chosen.values()) else None


def open_device(**options: Any) -> Device:
    """A device with options of its own and of its groups."""
    return Device(**grouped(**options))
