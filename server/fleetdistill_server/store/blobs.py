"""Interfaces for the storage of payloads and checkpoints, and the header of payload files.

`file_blobs.py` stores blobs as files, `memory_blobs.py` in a dictionary for simulation, `object_blobs.py` in an object
store for a server beyond one machine.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fleetdistill.errors import NoSpaceError, StoreError, in_words
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.digests import Algorithm
from fleetdistill.wire.v1 import knowledge_pb2

__all__ = ["disk_errors"]

_SAFETENSORS_TYPES = {
    "<f4": "F32",
    "<f2": "F16",
    "<f8": "F64",
    "<i4": "I32",
    "<i8": "I64",
    "|u1": "U8",
    "|i1": "I8",
    "|b1": "BOOL",
}
_ALIGNMENT = 64

Digests = Mapping[Algorithm, bytes]
"""Digests of a payload, by algorithm."""
NO_DIGESTS: Digests = {}


@dataclass(frozen=True)
class StoredBlob:
    """A stored payload or checkpoint.

    Attributes:
        sha256: SHA-256 digest.
        bytes: Size on disk in bytes.
        age_seconds: Seconds since the blob was written or last stored again with `put`.
    """

    sha256: bytes
    bytes: int
    age_seconds: float


@dataclass(frozen=True)
class Staged:
    """A partly received payload.

    Attributes:
        key: Key passed to `Blobs.stage`.
        bytes: Size on disk in bytes.
        age_seconds: Seconds since data was last appended.
    """

    key: str
    bytes: int
    age_seconds: float


class Staging(Protocol):
    """Staging area of a payload that is being received.

    Attributes:
        length: Number of data bytes appended so far.
    """

    length: int

    def append(self, data: bytes | memoryview) -> None:
        """Appends data."""

    def read(self, start: int, size: int) -> bytes:
        """Returns data that was appended."""

    def commit(self, sha256: bytes) -> None:
        """Stores the payload durably under its digest."""

    def discard(self) -> None:
        """Deletes the staged data."""

    def close(self) -> None:
        """Closes the staging area; the data remains for a later `stage` with the same key."""


class Blobs(Protocol):
    """Storage of payloads and checkpoints, addressed by digest.

    `sha256` is the SHA-256 of a payload or a checkpoint, or the BLAKE3 of a payload that it identifies.

    Attributes:
        space: Checked before a payload is written; None to use the disk without limits.
    """

    space: Space | None

    def check(self) -> None:
        """Raises ConfigurationError if the configured place of the payloads does not exist."""

    def stage(self, key: str, parts: knowledge_pb2.Parts, digests: Digests = NO_DIGESTS) -> Staging:
        """Opens the staging area of an upload; keeps data staged earlier if parts and digests are equal."""

    def staged(self, key: str) -> int:
        """Returns the number of data bytes staged under a key; 0 for an unknown key."""

    def open(self, sha256: bytes, *, verify: bool = False) -> Payload:
        """Maps a payload into memory; with `verify`, reads it completely and compares its digest.

        Raises:
            DamagedError: The payload is missing or damaged.
        """

    def has(self, sha256: bytes) -> bool:
        """Returns whether a payload or checkpoint exists; its content is not checked."""

    def put(self, payload: Payload) -> None:
        """Stores a payload. If it exists already, its age is reset, and a damaged copy is replaced."""

    def trim(self) -> None:
        """Deletes this machine's copies of blobs that were deleted elsewhere or are not in use."""

    def forget_verified(self) -> None:
        """Clears the record of verified payloads, so that the next `put` of each reads it again."""

    def quarantine(self, sha256: bytes) -> None:
        """Moves a payload to quarantine, after which it cannot be read. Does nothing if it is missing."""

    def drop_quarantined(self, digests: Collection[bytes]) -> None:
        """Deletes quarantined files with these digests; digests without a file are ignored."""

    def held(self) -> list[StoredBlob]:
        """Returns all stored payloads and checkpoints, in no particular order."""

    def age_seconds(self, sha256: bytes) -> float:
        """Returns the seconds since a blob was written or last stored again with `put`; infinity if it is missing."""

    def staging(self) -> list[Staged]:
        """Returns all staged payloads, in no particular order."""

    def discard(self, key: str) -> None:
        """Deletes the data staged under a key."""

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """Locks the blobs against deletion by other processes.

        The context manager yields True if no other process has the lock, and False otherwise.
        """

    def drop(self, sha256: bytes) -> None:
        """Deletes a payload or checkpoint; does nothing if it does not exist."""

    def put_state(self, data: bytes) -> bytes:
        """Stores a checkpoint; returns its SHA-256 digest."""

    def get_state(self, sha256: bytes) -> bytes:
        """Reads a checkpoint. Raises DamagedError if it is missing or damaged."""


def stated(sha256: bytes, blake3: bytes) -> Digests:
    """Returns the digests of a payload to store beside it; none for SHA-256 alone, which is in the payload's name."""
    if not blake3:
        return NO_DIGESTS
    return dict(zip(Algorithm, (sha256, blake3), strict=True))


def check_digests(name: bytes, digests: Digests) -> tuple[bytes, bytes]:
    """Returns the SHA-256 and the BLAKE3 of a stored payload; a missing one is empty.

    Args:
        name: Digest by which the payload is addressed.
        digests: Digests that are stored beside the payload.

    Raises:
        ValueError: The payload that is stored under the name is another one.
    """
    result: Digests = digests if digests else {Algorithm.SHA256: name}
    if name not in result.values():
        raise ValueError("it is another payload")
    return result.get(Algorithm.SHA256, b""), result.get(Algorithm.BLAKE3, b"")


def safetensors_header(parts: knowledge_pb2.Parts, digests: Digests = NO_DIGESTS) -> bytes:
    """Returns the bytes before the tensor data in the safetensors format: length, JSON and padding."""
    tensors: dict[str, object] = {
        slot.path: {
            "dtype": _SAFETENSORS_TYPES[slot.dtype.str],
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.stop],
        }
        for slot in wire.slots(parts)
    }
    encoded = base64.b64encode(parts.SerializeToString(deterministic=True)).decode()
    metadata = {"parts": encoded, **{str(name): value.hex() for name, value in digests.items() if value}}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Converts OSError to StoreError, and to NoSpaceError if the disk is full. The message begins with `doing`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{doing}: the disk is full") from error
        raise StoreError(f"{doing}: {in_words(error)}") from error


class Space(Protocol):
    """Disk-space check; implemented by `disk_space.DiskSpace`."""

    def check(self, size: int) -> None:
        """Raises NoSpaceError unless there is room for a payload of `size` bytes."""
