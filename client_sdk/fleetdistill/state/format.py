"""Versions of the state directory, and files of it that are damaged or of a newer SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetdistill.errors import StateError
from fleetdistill.version import VERSION

FORMAT = 2
"""Of the state directory. It grows when an older SDK could not read what a newer one writes; 1 is that of 0.1."""


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    """The object in a JSON file. Raises StateError for anything else."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise damaged_error(path, error) from error
    if not isinstance(found, dict):
        raise damaged_error(path, f"expected an object, found {type(found).__name__}")
    return found


def damaged_error(path: Path, why: object) -> StateError:
    """The error for a file that cannot be read."""
    return StateError(f"{path} is damaged: {why}; restore it, or use a fresh state directory")


def check_format(path: Path, saved: dict[str, Any]) -> None:
    """Raises StateError for a file of a newer SDK, or without a number for its format; without any it is of 0.1."""
    found = saved.get("format", 1)
    if not isinstance(found, int):
        raise damaged_error(path, f"its format is {found!r}")
    if found > FORMAT:
        raise newer_error(path, f"it has format {found}, SDK {saved.get('sdk', 'unknown')}")


def newer_error(path: Path, what: str) -> StateError:
    """The error for a file of a newer SDK."""
    return StateError(
        f"{path} was written by a newer SDK: {what}; this one is {VERSION} and reads formats up to {FORMAT}: "
        "update it, or use a fresh state directory"
    )
