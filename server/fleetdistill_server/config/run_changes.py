"""The differences between two configurations of a run, setting by setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Changes = Mapping[str, tuple[Any, Any]]
"""Maps `section.key` to the values before and after; None for a missing setting."""


def changes_between(known: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Returns the settings that differ, by name, with both values."""
    before, after = _flat(known), _flat(new)
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def describe_changes(changes: Changes) -> str:
    """Returns the changes as one line of text."""
    return "; ".join(f"{key} was {before!r}, is {after!r}" for key, (before, after) in changes.items())


def conflict_message(name: str, changes: Changes) -> str:
    """Returns the error message for changes that an existing run does not allow."""
    return (
        f"run {name!r} exists with another configuration: {describe_changes(changes)}; "
        "put the old values back, or give the changed run a new name"
    )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()}
