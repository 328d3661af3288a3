"""How two configurations of a run differ, setting by setting, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Changes = Mapping[str, tuple[Any, Any]]
"""`section.key` to the value before and after; None where there was or is none."""


def changes_between(known: Mapping[str, Any], given: Mapping[str, Any]) -> Changes:
    """The settings that differ, by name."""
    before, after = _flat(known), _flat(given)
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def told(changes: Changes) -> str:
    """What changed, in one line."""
    return "; ".join(f"{key} was {before!r}, is {after!r}" for key, (before, after) in changes.items())


def refusal(name: str, changes: Changes) -> str:
    """The sentence about a run that cannot be changed so."""
    return (
        f"run {name!r} exists with another configuration: {told(changes)}; "
        "put the old values back, or give the changed run a new name"
    )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()}
