"""Blob storage in files: one safetensors file per payload, named by the payload's digest.

The file's metadata contain the typed parts and its tensors the payload's data in order. `safetensors.safe_open` can
read it, and an offset in the payload is a file offset minus the header size. A payload is received into a staging file
and renamed into place after an fsync; then the directory is fsynced.

    ab/ab....safetensors    a payload or checkpoint, by its digest
    staging/KEY.part        a partly received payload
    quarantine/             files that do not match their digest. They are never read, and deleted only if they can
                            contain data of a forgotten device
    gc.lock                 lock for processes that delete payloads or must prevent deletion
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from fleetdistill.errors import DamagedError, StoreError, WireError
from fleetdistill.state import failpoints
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory, write_all
from fleetdistill.state.file_lock import lock_file
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.digests import Algorithm, Check, digest, has_blake3
from fleetdistill.wire.v1 import knowledge_pb2
from fleetdistill_server.store.blobs import (
    NO_DIGESTS,
    Digests,
    Space,
    Staged,
    StoredBlob,
    check_digests,
    disk_errors,
    safetensors_header,
    stated,
)

_WRITEBACK_BYTES = 4 << 20
_CACHED_BYTES = 8 << 20
# Keys are used as file names. The server generates them; they never contain text sent by a device.
_KEY = re.compile(r"[a-z0-9-]{1,200}")
SUFFIX = ".safetensors"
# Other files in the directory, such as those of a file manager, are ignored.
HELD_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_STAGED_NAME = re.compile(r"[a-z0-9-]{1,200}\.part")


def _described_in(header_text: bytes) -> tuple[knowledge_pb2.Parts, Digests]:
    """Returns the parts in a payload's file and the digests that are stored beside them."""
    metadata = json.loads(header_text)["__metadata__"]
    digests = {item: bytes.fromhex(metadata[item]) for item in Algorithm if item in metadata}
    return knowledge_pb2.Parts.FromString(base64.b64decode(metadata["parts"])), digests


class FileBlobs:
    """Payloads and checkpoints as files in a directory. Implements `Blobs`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._staging = directory / "staging"
        self.space: Space | None = None
        self._intact: set[bytes] = set()  # payloads that this process has written or verified
        self._durable: set[Path] = set()  # folders whose names this process has made durable
        # Payloads in use: many devices download one at the same time. A file that was replaced or deleted is not found.
        self._opened: WeakValueDictionary[tuple[int, ...], Payload] = WeakValueDictionary()
        with disk_errors("creating the blob directory"):
            make_directory(directory)
            self._staging.mkdir(exist_ok=True)  # neither the directory nor its contents need to be durable

    def check(self) -> None:
        return

    def stage(self, key: str, parts: knowledge_pb2.Parts, digests: Digests = NO_DIGESTS) -> _FileStaging:
        with disk_errors("staging an upload"):
            return _FileStaging(self.staging_path(key), safetensors_header(parts, digests), self._publish)

    def staged(self, key: str) -> int:
        path = self.staging_path(key)
        with disk_errors(f"reading the staged upload {key}"):
            try:
                with path.open("rb") as file:
                    header_bytes = 8 + int.from_bytes(file.read(8), "little")
                    return max(os.fstat(file.fileno()).st_size - header_bytes, 0)
            except FileNotFoundError:
                return 0

    def open(self, sha256: bytes, *, verify: bool = False) -> Payload:
        with _damage(sha256), disk_errors(f"reading payload {sha256.hex()}"):
            path = self.path_of(sha256)
            known = None if verify else self._opened.get(_version(path.stat()))
            return self._open(sha256, path, verify) if known is None else known

    def _open(self, sha256: bytes, path: Path, verify: bool) -> Payload:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header_bytes = 8 + int.from_bytes(view[:8], "little")
            parts, digests = _described_in(view[8:header_bytes])
            source = _MappedSource(view, header_bytes)
            payload = Payload(parts, wire.slots(parts), source, *check_digests(sha256, digests))
            if len(view) != header_bytes + payload.data_bytes:
                raise ValueError(f"its file has {len(view)} bytes, expected {header_bytes + payload.data_bytes}")
            if verify:
                file.seek(header_bytes)
                _verify(payload, file)
                self._intact.add(sha256)
            self._opened[_version(os.fstat(file.fileno()))] = payload
        return payload

    def has(self, sha256: bytes) -> bool:
        return self.path_of(sha256).exists()

    def put(self, payload: Payload) -> None:
        if self._is_intact(payload.digest) and self._renewed(payload.digest):
            return
        key = f"put-{payload.digest.hex()}-{os.getpid()}"
        if self.space is not None:
            self.space.check(payload.data_bytes)
        _retry_after_sweep(lambda: self._put(key, payload))
        self._intact.add(payload.digest)

    def _put(self, key: str, payload: Payload) -> None:
        self.staging_path(key).unlink(missing_ok=True)  # data left by a crash is unverified
        blake3 = payload.blake3 or self._blake3_of(payload)
        staging = self.stage(key, payload.parts, stated(payload.sha256, blake3))
        for piece in wire.pieces(payload.source, 0, payload.data_bytes):
            staging.append(piece)
        staging.commit(payload.digest)

    def _blake3_of(self, payload: Payload) -> bytes:
        """Returns the BLAKE3 of a payload that devices may download, so that they need not compute its SHA-256."""
        if not has_blake3():
            return b""
        return digest(payload.parts, wire.pieces(payload.source, 0, payload.data_bytes), Algorithm.BLAKE3)

    def _renewed(self, sha256: bytes) -> bool:
        """Resets a payload's age, so that sweeps keep it until it is referenced; returns False if it is missing.

        Also makes the file durable, because the process that wrote it may have crashed before doing so.
        """
        path = self.path_of(sha256)
        with disk_errors("making a payload durable"):
            try:
                os.utime(path)
            except FileNotFoundError:  # deleted by a sweep
                return False
            sync_directory(path.parent)
            self._sync_folder(path.parent)
        return True

    def _is_intact(self, sha256: bytes) -> bool:
        """Returns whether a payload exists and is undamaged; a damaged payload is quarantined."""
        if not self.has(sha256):
            return False
        if sha256 not in self._intact:
            try:
                self.open(sha256, verify=True)
            except DamagedError:
                self.quarantine(sha256)
                return False
        return True

    def trim(self) -> None:
        return  # every file is the only copy

    def forget_verified(self) -> None:
        self._intact.clear()

    def quarantine(self, sha256: bytes) -> None:
        self._intact.discard(sha256)
        source = self.path_of(sha256)
        # The timestamp keeps earlier damaged files of the same digest.
        target = self._directory / "quarantine" / f"{sha256.hex()}-{time.time_ns()}{SUFFIX}"
        with disk_errors(f"quarantining {sha256.hex()}"), contextlib.suppress(FileNotFoundError):
            make_directory(target.parent)
            source.replace(target)
            sync_directory(target.parent)
            sync_directory(source.parent)

    def drop_quarantined(self, digests: Collection[bytes]) -> None:
        names = {sha256.hex() for sha256 in digests}
        with disk_errors("deleting quarantined files"):
            for file in (self._directory / "quarantine").glob(f"*{SUFFIX}"):
                if file.name.partition("-")[0] in names:
                    file.unlink(missing_ok=True)

    def held(self) -> list[StoredBlob]:
        with disk_errors("listing the payloads"):
            folders = [item for item in self._directory.iterdir() if len(item.name) == 2 and item.is_dir()]
            files = [item for folder in folders for item in os.scandir(folder) if HELD_NAME.fullmatch(item.name)]
            return [
                StoredBlob(bytes.fromhex(file.name.removesuffix(SUFFIX)), stat.st_size, _age(stat))
                for file in files
                if (stat := _stat(file)) is not None
            ]

    def age_seconds(self, sha256: bytes) -> float:
        with disk_errors(f"reading the age of {sha256.hex()}"), contextlib.suppress(FileNotFoundError):
            return _age(self.path_of(sha256).stat())
        return math.inf

    def staging(self) -> list[Staged]:
        with disk_errors("listing staged uploads"):
            return [
                Staged(file.name.removesuffix(".part"), stat.st_size, _age(stat))
                for file in os.scandir(self._staging)
                if _STAGED_NAME.fullmatch(file.name) and (stat := _stat(file)) is not None
            ]

    def discard(self, key: str) -> None:
        with disk_errors(f"deleting the staged upload {key}"):
            self.staging_path(key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        with disk_errors("locking the payloads"):
            lock = lock_file(self._directory / "gc.lock")
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()

    def drop(self, sha256: bytes) -> None:
        self._intact.discard(sha256)
        with disk_errors(f"deleting {sha256.hex()}"):
            self.path_of(sha256).unlink(missing_ok=True)

    def put_state(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).digest()
        _retry_after_sweep(lambda: self._put_state(sha256, data))
        return sha256

    def _put_state(self, sha256: bytes, data: bytes) -> None:
        with disk_errors("writing a checkpoint"):
            temporary = self.staging_path(f"state-{os.getpid()}")
            with temporary.open("wb") as file:
                file.write(data)
            self._publish(temporary, sha256)

    def _publish(self, complete: Path, sha256: bytes) -> None:
        """Stores a complete staging file durably under its digest."""
        target = self.path_of(sha256)
        with contextlib.suppress(FileExistsError):
            target.parent.mkdir()
            self._durable.discard(target.parent)
        rename_durably(complete, target)
        self._sync_folder(target.parent)

    def _sync_folder(self, folder: Path) -> None:
        """Makes the name of a folder durable, which another process may have created just before a crash."""
        if folder not in self._durable:
            sync_directory(folder.parent)
            self._durable.add(folder)

    def get_state(self, sha256: bytes) -> bytes:
        with _damage(sha256, "checkpoint"), disk_errors(f"reading checkpoint {sha256.hex()}"):
            data = self.path_of(sha256).read_bytes()
            if hashlib.sha256(data).digest() != sha256:
                raise ValueError("its SHA-256 does not match")
        return data

    def path_of(self, sha256: bytes) -> Path:
        """Returns the file path of a payload or checkpoint; the file need not exist."""
        name = sha256.hex()
        return self._directory / name[:2] / f"{name}{SUFFIX}"

    def staging_path(self, key: str) -> Path:
        """Returns the path of the staging file with a key; the file need not exist."""
        if not _KEY.fullmatch(key):
            raise StoreError(f"staging key {key!r} is invalid; expected 1 to 200 characters from a-z, 0-9 and -")
        return self._staging / f"{key}.part"


def _retry_after_sweep(write: Callable[[], None]) -> None:
    """Writes a file; retries once if a sweep deleted its staged data as a leftover of an ended process."""
    try:
        write()
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        write()


@contextlib.contextmanager
def _damage(sha256: bytes, what: str = "payload") -> Iterator[None]:
    """Converts errors caused by a missing or damaged file to DamagedError; lets transient errors pass."""
    try:
        yield
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise DamagedError(sha256, f"{what} {sha256.hex()} is not in the store") from error
        if isinstance(cause, OSError) and cause.errno == errno.EIO:
            raise DamagedError(sha256, f"{what} {sha256.hex()} is damaged: {cause.strerror}") from error
        raise
    except (ValueError, KeyError, TypeError, DecodeError, WireError) as error:
        raise DamagedError(sha256, f"{what} {sha256.hex()} is damaged: {error}") from error


def _verify(payload: Payload, data: IO[bytes]) -> None:
    """Compares the rest of the file with the payload's digest. Raises ValueError if they differ."""
    check = Check(payload.header())
    while piece := data.read(wire.CHUNK_BYTES):
        check.update(piece)
    if not check.matches():
        raise ValueError(f"its {check.algorithm.label} does not match")


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Returns the entry's status, or None if another process has deleted or renamed it in the meantime."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None


def _version(found: os.stat_result) -> tuple[int, ...]:
    """Returns what identifies a file and its content, while it is mapped."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _age(found: os.stat_result) -> float:
    """Returns the seconds since a file was written, renamed or touched."""
    return time.time() - max(found.st_mtime, found.st_ctime)


class _FileStaging:
    def __init__(self, path: Path, header: bytes, publish: Callable[[Path, bytes], None]) -> None:
        self._path = path
        self._publish = publish
        self._header_bytes = len(header)
        fresh = not _starts_with(path, header)
        self._file = path.open("w+b" if fresh else "r+b", buffering=0)
        if fresh:
            write_all(self._file, header)
        self.length = self._file.seek(0, os.SEEK_END) - len(header)
        self._handed_over = self.length

    def append(self, data: bytes | memoryview) -> None:
        with disk_errors("writing an upload"):
            failpoints.hit("blob.before-staged-write")
            write_all(self._file, data)
            failpoints.hit("blob.after-staged-write")
        self.length += len(data)
        if self.length - self._handed_over >= _WRITEBACK_BYTES:
            self._begin_writeback()

    def _begin_writeback(self) -> None:
        """Starts writing data to disk while more is received, which shortens the fsync at the end.

        The same call drops older data from the page cache, so that large uploads do not evict other pages.
        """
        begin = max(self._handed_over - _CACHED_BYTES, 0)
        if hasattr(os, "posix_fadvise"):  # not available on macOS
            with contextlib.suppress(OSError):  # only a hint; the fsync reports errors
                os.posix_fadvise(self._file.fileno(), begin, self.length - begin, os.POSIX_FADV_DONTNEED)
        self._handed_over = self.length

    def read(self, start: int, size: int) -> bytes:
        with disk_errors("reading an upload"), self._path.open("rb") as file:
            file.seek(self._header_bytes + start)
            return file.read(size)

    def commit(self, sha256: bytes) -> None:
        with disk_errors("making an upload durable"):
            failpoints.hit("blob.before-commit")
            self._file.close()
            self._publish(self._path, sha256)
            failpoints.hit("blob.after-commit")

    def discard(self) -> None:
        self.close()
        with disk_errors("deleting a staged upload"):
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

    def view(self, start: int, size: int) -> memoryview:
        return memoryview(self._view)[self._header_bytes + start : self._header_bytes + start + size]
