"""Finds damage in files with a device's state or models, without loading torch."""

from __future__ import annotations

import io
import json
from typing import Any

import google_crc32c

from fleetdistill.errors import StateError
from fleetdistill.state.files import Files
from fleetdistill.state.weights import load_state

STATES = ("state.safetensors", "delivered.safetensors")
"""The files with the committed state and with the app's models."""
NO_CRC = "0" * 8
"""The CRC-32C with which a document's own CRC-32C is computed."""
_ZIP = b"PK"
_SAFETENSORS = b"{"  # the byte after the size of the header, 8 bytes


def damaged_states(files: Files) -> dict[str, str]:
    """Returns the damaged state files with what is wrong; a format without checksums cannot be checked.

    A file whose format is unrecognisable counts as damaged if the other one has checksums.
    """
    result, damaged = dict[str, bytes](), dict[str, str]()
    for name in STATES:
        try:
            if (data := load_state(files, name)) is not None:
                result[name] = data
        except StateError as error:
            damaged[name] = str(error).removeprefix("the saved state is damaged: ")
    if damaged or any(map(_has_checksum, result.values())):
        damaged |= {name: reason for name, data in result.items() if (reason := damage_of(data))}
    return damaged


def _has_checksum(data: bytes) -> bool:
    """Returns whether a state file has a format of the SDK; a custom worker may have its own."""
    return data.startswith(_ZIP) or (data[8:9] == _SAFETENSORS and b"crc32c" in data)


def is_light(data: bytes) -> bool:
    """Returns whether a state file is that of a device without PyTorch."""
    return data.startswith(_ZIP)


def damage_of(data: bytes) -> str:
    """Returns what is damaged in a state file with checksums, or an empty text."""
    try:
        if data.startswith(_ZIP):
            return _damage_of_zip(data)
        header_bytes = int.from_bytes(data[:8], "little")
        outline = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["outline"])
    except (ValueError, KeyError, TypeError):
        return "its header cannot be read"
    return "" if matches_crc(data, outline) else "it does not match its checksum"


def _damage_of_zip(data: bytes) -> str:
    from zipfile import BadZipFile, ZipFile  # slow to load, and an idle device does not need it

    try:
        with ZipFile(io.BytesIO(data)) as file:
            return "" if file.testzip() is None else "it does not match its checksum"
    except (BadZipFile, EOFError, OSError, RuntimeError, ValueError):
        return "its archive cannot be read"


def with_crc(data: bytes) -> bytes:
    """Returns a document with the CRC-32C of itself, computed with zeros in its place."""
    return data.replace(_crc_member(NO_CRC), _crc_member(f"{google_crc32c.value(data):08x}"), 1)


def matches_crc(data: bytes, outline: Any) -> bool:
    """Returns whether a document matches the CRC-32C in its outline."""
    result = outline.get("crc32c") if isinstance(outline, dict) else None
    return result is not None and with_crc(data.replace(_crc_member(result), _crc_member(NO_CRC), 1)) == data


def _crc_member(value: str) -> bytes:
    return rf"\"crc32c\": \"{value}\"".encode()
