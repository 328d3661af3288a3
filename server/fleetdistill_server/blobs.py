"""Payloads at rest: one safetensors file each, named by the payload's digest.

The file's metadata hold the typed parts, its tensors the payload's data in order, so `safetensors.safe_open` reads it
and a payload's byte offset is a file offset plus a constant. A payload grows in a staging file and is renamed into
place after its fsync; then the directory is fsynced. `MemoryBlobs` does the same in a dictionary for simulation.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from fleetdistill.errors import StoreError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2

_SAFETENSORS_TYPES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i4": "I32", "<i8": "I64", "|u1": "U8", "|b1": "BOOL"}
_ALIGNMENT = 64


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
    """Where payloads rest; files or a dictionary."""

    def stage(self, key: str, parts: knowledge_pb2.Parts) -> Staging:
        """Opens the staging area of an upload, with what it already holds if it was begun with the same parts."""

    def staged(self, key: str) -> int:
        """Data bytes held for a staging key; 0 for an unknown one."""

    def open(self, sha256: bytes) -> Payload:
        """Maps a payload. Raises StoreError if it is not there."""

    def put(self, payload: Payload) -> None:
        """Stores a payload that is made here."""

    def drop(self, sha256: bytes) -> None:
        """Deletes a payload or a checkpoint; one that is not there is no error."""

    def put_state(self, data: bytes) -> bytes:
        """Stores a checkpoint; returns its SHA-256."""

    def get_state(self, sha256: bytes) -> bytes:
        """Reads a checkpoint. Raises StoreError if it is missing or damaged."""


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


def _parts_in(header_text: bytes) -> knowledge_pb2.Parts:
    encoded = json.loads(header_text)["__metadata__"]["parts"]
    return knowledge_pb2.Parts.FromString(base64.b64decode(encoded))


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns the operating system's errors into StoreError; a full disk says so."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(f"{doing}: {'the disk is full' if full else error}") from error


class FileBlobs:
    """Payloads as files under a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._staging = directory / "staging"
        with disk_errors("making the blob directory"):
            self._staging.mkdir(parents=True, exist_ok=True)

    def stage(self, key: str, parts: knowledge_pb2.Parts) -> _FileStaging:
        with disk_errors("staging an upload"):
            return _FileStaging(self._staging_path(key), safetensors_header(parts), self._path)

    def staged(self, key: str) -> int:
        path = self._staging_path(key)
        if not path.exists():
            return 0
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        return max(path.stat().st_size - header_bytes, 0)

    def open(self, sha256: bytes) -> Payload:
        path = self._path(sha256)
        if not path.exists():
            raise StoreError(f"payload {sha256.hex()} is not in the store")
        try:
            with disk_errors(f"mapping payload {sha256.hex()}"), path.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header_bytes = 8 + int.from_bytes(view[:8], "little")
            parts = _parts_in(view[8:header_bytes])
        except (ValueError, KeyError, DecodeError) as error:
            raise StoreError(f"payload {sha256.hex()} is damaged: {error}") from error
        payload = Payload(parts, wire.slots(parts), _MappedSource(view, header_bytes), sha256)
        if len(view) != header_bytes + payload.data_bytes:
            text = f"{len(view)} bytes in its file instead of {header_bytes + payload.data_bytes}"
            raise StoreError(f"payload {sha256.hex()} is damaged: {text}")
        return payload

    def put(self, payload: Payload) -> None:
        if self._path(payload.sha256).exists():
            return
        key = f"put-{payload.sha256.hex()}-{os.getpid()}"
        self._staging_path(key).unlink(missing_ok=True)  # nobody checked what a crash left behind
        staging = self.stage(key, payload.parts)
        for piece in wire.pieces(payload.source, 0, payload.data_bytes):
            staging.append(piece)
        staging.commit(payload.sha256)

    def drop(self, sha256: bytes) -> None:
        with disk_errors(f"deleting {sha256.hex()}"):
            self._path(sha256).unlink(missing_ok=True)

    def put_state(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).digest()
        with disk_errors("writing a checkpoint"):
            temporary = self._staging / f"state-{os.getpid()}"
            with temporary.open("wb") as file:
                file.write(data)
            _rename_durably(temporary, self._path(sha256))
        return sha256

    def get_state(self, sha256: bytes) -> bytes:
        with disk_errors(f"reading checkpoint {sha256.hex()}"):
            data = self._path(sha256).read_bytes()
        if hashlib.sha256(data).digest() != sha256:
            raise StoreError(f"checkpoint {sha256.hex()} is damaged: its SHA-256 does not match")
        return data

    def _path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self._directory / name[:2] / f"{name}.safetensors"

    def _staging_path(self, key: str) -> Path:
        # Keys hold device names; a digest keeps anything a device says out of file names.
        return self._staging / f"{hashlib.sha256(key.encode()).hexdigest()}.part"


class _FileStaging:
    def __init__(self, path: Path, header: bytes, path_of: Callable[[bytes], Path]) -> None:
        self._path = path
        self._path_of = path_of
        self._header_bytes = len(header)
        fresh = not _starts_with(path, header)
        self._file = path.open("w+b" if fresh else "r+b")
        if fresh:
            self._file.write(header)
        self._file.seek(0, os.SEEK_END)
        self.length = self._file.tell() - len(header)

    def append(self, data: bytes) -> None:
        with disk_errors("writing an upload"):
            self._file.seek(self._header_bytes + self.length)
            self._file.write(data)
        self.length += len(data)

    def read(self, start: int, size: int) -> bytes:
        with disk_errors("writing an upload"):  # reading writes out what is buffered
            self._file.seek(self._header_bytes + start)
            return self._file.read(size)

    def commit(self, sha256: bytes) -> None:
        with disk_errors("making an upload durable"):
            self._file.close()
            _rename_durably(self._path, self._path_of(sha256))

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _starts_with(path: Path, header: bytes) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


class _MappedSource:
    def __init__(self, view: mmap.mmap, header_bytes: int) -> None:
        self._view = view
        self._header_bytes = header_bytes

    def read(self, start: int, size: int) -> bytes:
        return self._view[self._header_bytes + start : self._header_bytes + start + size]


def _rename_durably(source: Path, target: Path) -> None:
    """Content first, then the name: after this a power cut leaves the whole file or none."""
    target.parent.mkdir(exist_ok=True)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    for directory in (target.parent, target.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class MemoryBlobs:
    """Payloads in a dictionary, for simulation and tests."""

    def __init__(self) -> None:
        self._payloads: dict[bytes, tuple[knowledge_pb2.Parts, bytes]] = {}
        self._states: dict[bytes, bytes] = {}
        self._staging: dict[str, _MemoryStaging] = {}

    def stage(self, key: str, parts: knowledge_pb2.Parts) -> _MemoryStaging:
        known = self._staging.get(key)
        if known is None or known.parts != parts:
            known = _MemoryStaging(self, key, parts)
            self._staging[key] = known
        return known

    def staged(self, key: str) -> int:
        return self._staging[key].length if key in self._staging else 0

    def open(self, sha256: bytes) -> Payload:
        if sha256 not in self._payloads:
            raise StoreError(f"payload {sha256.hex()} is not in the store")
        parts, data = self._payloads[sha256]
        return Payload(parts, wire.slots(parts), _BytesSource(data), sha256)

    def put(self, payload: Payload) -> None:
        data = b"".join(wire.pieces(payload.source, 0, payload.data_bytes))
        self._payloads[payload.sha256] = (payload.parts, data)

    def drop(self, sha256: bytes) -> None:
        self._payloads.pop(sha256, None)
        self._states.pop(sha256, None)

    def put_state(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).digest()
        self._states[sha256] = data
        return sha256

    def get_state(self, sha256: bytes) -> bytes:
        if sha256 not in self._states:
            raise StoreError(f"checkpoint {sha256.hex()} is not in the store")
        return self._states[sha256]


class _MemoryStaging:
    def __init__(self, blobs: MemoryBlobs, key: str, parts: knowledge_pb2.Parts) -> None:
        self.parts = parts
        self.length = 0
        self._blobs = blobs
        self._key = key
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        self._data += data
        self.length = len(self._data)

    def read(self, start: int, size: int) -> bytes:
        return bytes(self._data[start : start + size])

    def commit(self, sha256: bytes) -> None:
        self._blobs._payloads[sha256] = (self.parts, bytes(self._data))
        self.discard()

    def discard(self) -> None:
        self._blobs._staging.pop(self._key, None)

    def close(self) -> None:
        return


class _BytesSource:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        return self._data[start : start + size]
