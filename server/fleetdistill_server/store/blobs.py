"""Payloads at rest: what a store needs of them, and the header of their files.

`file_blobs.py` keeps them as files, `memory_blobs.py` in a dictionary for simulation.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from fleetdistill.errors import NoSpaceError, StoreError, in_words
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2

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


@dataclass(frozen=True)
class Held:
    """A payload or a checkpoint at rest.

    Attributes:
        sha256: Its digest.
        bytes: Its size on the disk.
        age_seconds: Since it was written, or last put again.
    """

    sha256: bytes
    bytes: int
    age_seconds: float


@dataclass(frozen=True)
class Staged:
    """What has come of a payload that is on its way in.

    Attributes:
        key: As in `Blobs.stage`.
        bytes: Its size on the disk.
        age_seconds: Since something was added.
    """

    key: str
    bytes: int
    age_seconds: float


class Staging(Protocol):
    """A payload on its way in. `length` data bytes are held so far."""

    length: int

    def append(self, data: bytes) -> None:
        """Adds data at the end."""

    def read(self, start: int, size: int) -> bytes:
        """Gives back data that was appended."""

    def commit(self, sha256: bytes) -> None:
        """Makes the payload durable under its digest."""

    def discard(self) -> None:
        """Forgets it."""

    def close(self) -> None:
        """Releases it; what was appended stays for a later `stage` of the same key."""


class Blobs(Protocol):
    """Where payloads rest; files or a dictionary.

    Attributes:
        space: Asked before a payload is put; None: only the disk itself says no.
    """

    space: Space | None

    def stage(self, key: str, parts: knowledge_pb2.Parts) -> Staging:
        """Opens the staging area of an upload, with what it already holds if it was begun with the same parts."""

    def staged(self, key: str) -> int:
        """Data bytes held for a staging key; 0 for an unknown one."""

    def open(self, sha256: bytes, *, verify: bool = False) -> Payload:
        """Maps a payload; with `verify` reads it once and holds it against its digest.

        Raises:
            DamagedError: It is not there, or damaged.
        """

    def has(self, sha256: bytes) -> bool:
        """Whether a payload or a checkpoint is there, whatever it holds."""

    def put(self, payload: Payload) -> None:
        """Stores a payload that is made here; one that is there counts as written now, and is mended if need be."""

    def forget_verified(self) -> None:
        """Forgets which payloads are known to be whole: the next `put` of one reads it again."""

    def quarantine(self, sha256: bytes) -> None:
        """Puts a payload away where nothing reads it; one that is not there is no error."""

    def drop_quarantined(self, digests: Collection[bytes]) -> None:
        """Deletes what was put away under these digests; what is not there is no error."""

    def held(self) -> list[Held]:
        """Everything at rest, in no order."""

    def age_seconds(self, sha256: bytes) -> float:
        """Seconds since a payload or a checkpoint was written, or last put again; infinite where there is none."""

    def staging(self) -> list[Staged]:
        """Everything on its way in, in no order."""

    def discard(self, key: str) -> None:
        """Forgets what was staged under a key."""

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """For who deletes payloads, or needs that nobody does: True if no other process is within such a block."""

    def drop(self, sha256: bytes) -> None:
        """Deletes a payload or a checkpoint; one that is not there is no error."""

    def put_state(self, data: bytes) -> bytes:
        """Stores a checkpoint; returns its SHA-256."""

    def get_state(self, sha256: bytes) -> bytes:
        """Reads a checkpoint. Raises DamagedError if it is missing or damaged."""


def safetensors_header(parts: knowledge_pb2.Parts) -> bytes:
    """The bytes before the data: length, JSON and padding, as the safetensors format has them."""
    tensors: dict[str, object] = {
        slot.path: {
            "dtype": _SAFETENSORS_TYPES[slot.dtype.str],
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.stop],
        }
        for slot in wire.slots(parts)
    }
    encoded = base64.b64encode(parts.SerializeToString(deterministic=True)).decode()
    text = json.dumps({"__metadata__": {"parts": encoded}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns the operating system's errors into StoreError; a full disk says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{doing}: the disk is full") from error
        raise StoreError(f"{doing}: {in_words(error)}") from error


class Space(Protocol):
    """Room on the disk, `disk_space.DiskSpace`."""

    def check(self, size: int) -> None:
        """Raises NoSpaceError unless there is room for a payload that is about to be written."""
