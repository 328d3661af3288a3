"""Fetching payloads: checked chunk by chunk into a file, resumed where a broken connection or a dead process left off.

    <digest>.part       a download under way: it may be cut off anywhere, and is verified as a whole before it is used
    <digest>.payload    a whole payload

Both are the length of the header (8 bytes, little-endian), the header, and the data. Nothing here is fsynced: what a
power cut damages does not match its digest, is thrown away and fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import random
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

import google_crc32c
from google.protobuf.message import DecodeError

from fleetdistill.errors import LinkError, NoRoomError, PayloadTooLargeError, RefusedError, WireError
from fleetdistill.link.base import Link
from fleetdistill.state.directory import MAX_SPOOL_BYTES
from fleetdistill.state.disk import disk_errors, free_bytes
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import after_seconds, is_final
from fleetdistill.wire.compression import unpacked
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

DOWNLOADS = "downloads"
"""Folder of the state directory."""
ATTEMPTS = 5
PAUSE_SECONDS = 0.2
_LENGTH_BYTES = 8


def download(link: Link, identity: service_pb2.Identity, sha256: bytes, max_bytes: int = MAX_SPOOL_BYTES) -> Payload:
    """Fetches a payload for a caller that keeps nothing: its file is gone from the disk when it is mapped.

    Raises as `Downloads.fetch`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return Downloads(Path(folder), max_bytes).fetch(link, identity, sha256)


class Downloads:
    """The payloads that a device has fetched, by digest, in a folder of its own. One process at a time.

    Args:
        folder: Made when the first download comes.
        max_bytes: Most tensor bytes of one download.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._verified: set[bytes] = set()

    def fetch(self, link: Link, identity: service_pb2.Identity, sha256: bytes, keep: Collection[bytes] = ()) -> Payload:
        """The payload of a digest: the one that is held here, or fetched. All others but those of `keep` go.

        Raises:
            LinkError: The connection broke again and again, or the server has said no for now; what came so far stays,
                also for a later process.
            RefusedError: The server does not give it.
            WireError: What came is not what the digest names.
            PayloadTooLargeError: It is larger than this device takes.
            NoRoomError: The disk has no room for it.
            StateError: The folder cannot be used.
        """
        self._keep_only({sha256, *keep})
        held = self.stored(sha256)
        if held is not None:
            return held
        for attempt in range(ATTEMPTS):
            try:
                return self._fetch(link, identity, sha256)
            except LinkError as error:
                if (
                    attempt + 1 == ATTEMPTS or error.after_seconds
                ):  # a long pause is `Device.run`'s, which can be stopped
                    raise
                # A server that restarts needs a few seconds.
                time.sleep(PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")

    def stored(self, sha256: bytes) -> Payload | None:
        """The payload of a digest, mapped, if all of it is here; a damaged one is thrown away."""
        path = self._path(sha256, "payload")
        with disk_errors(self._folder):
            try:
                header, data = _mapped(path)
                return self._known(header, data, sha256)
            except FileNotFoundError:
                return None
            except (DecodeError, ValueError, WireError):
                path.unlink(missing_ok=True)
                return None

    def _known(self, header: knowledge_pb2.PayloadHeader, data: memoryview, sha256: bytes) -> Payload:
        """Hashed at its first use in a process, not at every one."""
        if sha256 in self._verified:
            return _payload(header, data, sha256)
        payload = checked(header, data, sha256)
        self._verified.add(sha256)
        return payload

    def _keep_only(self, digests: Collection[bytes]) -> None:
        if not self._folder.exists():
            return
        wanted = {digest.hex() for digest in digests}
        with disk_errors(self._folder):
            for path in self._folder.iterdir():
                if path.stem not in wanted:
                    with contextlib.suppress(PermissionError):  # Windows lets go of a mapped file later
                        path.unlink(missing_ok=True)

    def _fetch(self, link: Link, identity: service_pb2.Identity, sha256: bytes) -> Payload:
        part = _Part(self._path(sha256, "part"), self._max_bytes)
        try:
            with _passing_refusals(), disk_errors(self._folder):
                header, chunks = link.download(identity, sha256, part.length)
                digest = part.take(header, chunks)
            if digest != sha256:
                part.reject(f"a download has SHA-256 {digest.hex()[:16]}..., asked for {sha256.hex()[:16]}...")
        except NoRoomError:
            part.drop()
            raise
        path = self._path(sha256, "payload")
        with disk_errors(self._folder):
            part.path.replace(path)
            self._verified.add(sha256)
            return self._known(*_mapped(path), sha256)

    def _path(self, sha256: bytes, kind: str) -> Path:
        return self._folder / f"{sha256.hex()}.{kind}"


@contextlib.contextmanager
def _passing_refusals() -> Iterator[None]:
    """A refusal that passes by itself, such as of a stream that was too slow, is a connection that broke."""
    try:
        yield
    except RefusedError as refusal:
        if is_final(refusal.code):
            raise
        raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal


class _Part:
    """A download under way in its file. `length` data bytes of it are there."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._header: knowledge_pb2.PayloadHeader | None = None
        self.length = 0
        with disk_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError, DecodeError, ValueError):
                self._header, data = _mapped(path)
                self.length = len(data)
        self._resumed = self.length > 0

    def take(self, header: knowledge_pb2.PayloadHeader, chunks: Iterator[wire.AnyChunk]) -> bytes:
        """Writes what comes behind what is there; returns the SHA-256 of the whole."""
        self._check(header)
        running = hashlib.sha256(header.parts.SerializeToString(deterministic=True))
        with self.path.open("ab" if self._resumed else "wb") as file:
            if self._resumed:
                running.update(_mapped(self.path)[1])
            else:
                _write_header(file, header)
            for chunk in chunks:
                data = self._checked(chunk, header.data_bytes)
                running.update(data)
                file.write(data)
                self.length += len(data)
        if self.length < header.data_bytes:
            raise LinkError(f"a download ended after {self.length} of {header.data_bytes} bytes; going on from there")
        return running.digest()

    def _check(self, header: knowledge_pb2.PayloadHeader) -> None:
        if header.data_bytes > self._max_bytes:
            raise PayloadTooLargeError(header.data_bytes, self._max_bytes)
        if wire.data_bytes(header.parts) != header.data_bytes:
            tensors = wire.data_bytes(header.parts)
            self.reject(f"a download of {header.data_bytes} bytes has tensors of {tensors} bytes")
        if self._resumed and (header != self._header or self.length > header.data_bytes):
            self.reject("a download goes on with another header than it began with")
        missing, free = header.data_bytes - self.length, free_bytes(self.path.parent)
        if missing > free:
            raise NoRoomError(f"a download of {header.data_bytes} bytes lacks {missing}, the disk has {free} free")

    def _checked(self, chunk: wire.AnyChunk, data_bytes: int) -> bytes:
        sent = chunk.data  # each reading of the field copies it
        if google_crc32c.value(sent) != chunk.crc32c:
            raise LinkError("a downloaded chunk fails its CRC-32C; fetching it again")
        data = unpacked(sent, chunk.compression, wire.CHUNK_BYTES)
        if not data:
            self.reject("a download has a chunk without data")
        if self.length + len(data) > data_bytes:
            self.reject(f"a download goes on after its {data_bytes} bytes")
        return data

    def reject(self, why: str) -> None:
        """Throws it away. What an earlier process left may be to blame, so a resumed download is tried afresh."""
        self.drop()
        raise LinkError(f"{why}; fetching it anew") if self._resumed else WireError(why)

    def drop(self) -> None:
        """Forgets it."""
        with disk_errors(self.path.parent):
            self.path.unlink(missing_ok=True)


def adopt_proxy_set(state_dir: Path) -> None:
    """Moves the proxy set of a 0.1 state directory, `proxy/header.bin` and `proxy/data.bin`, to the downloads."""
    old = state_dir / "proxy"
    if not old.is_dir():
        return
    with disk_errors(state_dir):
        with contextlib.suppress(FileNotFoundError, DecodeError):  # half a proxy set is fetched again
            header = knowledge_pb2.PayloadHeader.FromString((old / "header.bin").read_bytes())
            data = (old / "data.bin").read_bytes()
            (state_dir / DOWNLOADS).mkdir(exist_ok=True)
            with (state_dir / DOWNLOADS / f"{header.sha256.hex()}.payload").open("wb") as file:
                _write_header(file, header)
                file.write(data)
        shutil.rmtree(old)


def _write_header(file: IO[bytes], header: knowledge_pb2.PayloadHeader) -> None:
    data = header.SerializeToString()
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def _mapped(path: Path) -> tuple[knowledge_pb2.PayloadHeader, memoryview]:
    """Header and data of a file. Raises ValueError or DecodeError if it is cut off before its data."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    if len(view) < max(start, _LENGTH_BYTES):
        raise ValueError(f"{path} ends within its header")
    return knowledge_pb2.PayloadHeader.FromString(bytes(view[_LENGTH_BYTES:start])), view[start:]


def checked(header: knowledge_pb2.PayloadHeader, data: bytes | memoryview, sha256: bytes) -> Payload:
    """The payload of a header and its data. Raises WireError unless they are what the digest names."""
    running = hashlib.sha256(header.parts.SerializeToString(deterministic=True))
    running.update(data)
    found = running.digest()
    if found != sha256:
        raise WireError(f"a download has SHA-256 {found.hex()[:16]}..., asked for {sha256.hex()[:16]}...")
    return _payload(header, data, sha256)


def _payload(header: knowledge_pb2.PayloadHeader, data: bytes | memoryview, sha256: bytes) -> Payload:
    """Raises WireError unless the data are those of the tensors: a digest tells who made both, not whether they fit."""
    payload = Payload(header.parts, wire.slots(header.parts), BytesSource(data), sha256)
    if payload.data_bytes != len(data):
        raise WireError(f"a download of {len(data)} bytes has tensors of {payload.data_bytes} bytes")
    return payload


class BytesSource:
    """A payload's data in memory, or mapped from a file."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on."""
        return bytes(self._data[start : start + size])
