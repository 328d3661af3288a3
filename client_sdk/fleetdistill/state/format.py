"""The format version of the state directory, and errors for files that are damaged or written by a newer SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from fleetdistill.errors import DamagedStateError, StateError
from fleetdistill.version import VERSION

FORMAT = 1
"""Format version of the state directory, increased when older SDKs cannot read it."""
_CHECKSUM = "crc"


def sealed_json(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Returns an object as a JSON file with the CRC-32C of its content, which `json_object` checks."""
    return json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=indent).encode()


def _checksum(content: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(content).encode()))


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    """Returns the object in a JSON file, without its checksum.

    Raises:
        StateError: The file does not contain an object, or does not match its checksum, if it has one.
    """
    try:
        result = json.loads(data)
    except ValueError as error:
        raise damaged_error(path, "it cannot be read as JSON" if data else "it is empty") from error
    if not isinstance(result, dict):
        raise damaged_error(path, f"expected an object, found {type(result).__name__}")
    known = result.pop(_CHECKSUM, None)
    if known is not None and known != _checksum(result):
        raise damaged_error(path, "it does not match its checksum")
    return result


def damaged_error(path: Path, reason: object) -> DamagedStateError:
    """Returns the error for a damaged file."""
    message = f"{path} is damaged: {reason}; restore the file, or use a new state directory"
    return DamagedStateError(path, message, str(reason))


def identity_error(path: Path, problem: str) -> DamagedStateError:
    """Returns the error for a `device.json` without which a device must not continue, as its id would be a new one."""
    message = (
        f"{path} {problem}. Restore it from a backup. Without one, erase the directory with `fleetdistill device "
        "forget DIR --local`, ask the operator for `fleetdistill devices forget RUN DEVICE`, and begin as a new device"
    )
    return DamagedStateError(path, message, problem.removeprefix("is damaged: "))


def check_format(path: Path, saved: dict[str, Any]) -> None:
    """Raises StateError for a file of a newer SDK or an invalid format."""
    result = saved.get("format", FORMAT)
    if not isinstance(result, int):
        raise damaged_error(path, f"its format is {result!r}")
    if result > FORMAT:
        raise newer_error(path, f"it has format {result}, SDK {saved.get('sdk', 'unknown')}")


def newer_error(path: Path, what: str) -> StateError:
    """Returns the error for a file of a newer SDK."""
    return StateError(
        f"{path} was written by a newer SDK: {what}. This SDK is {VERSION} and reads formats up to {FORMAT}; "
        "update it, or use a new state directory"
    )
