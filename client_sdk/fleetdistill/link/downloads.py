"""Downloads payloads: each chunk is checked, and an interrupted download resumes, even after a restart.

    <digest>.part       an incomplete download, truncated at any byte; verified as a whole before use
    <digest>.payload    a complete payload

Both contain the header's length (8 bytes, little-endian), the header, and the data. Only a payload that is kept is
fsynced: another that a power cut damages does not match its digest, and is deleted and downloaded again.
"""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Collection, Iterator
from io import RawIOBase
from pathlib import Path

from google.protobuf.message import DecodeError

from fleetdistill.errors import LinkError, NoRoomError, PayloadTooLargeError, RefusedError, WireError
from fleetdistill.interruption import pause
from fleetdistill.link.base import HandsOver, Link
from fleetdistill.state.directory import MAX_SPOOL_BYTES
from fleetdistill.state.disk import disk_errors, free_bytes
from fleetdistill.state.durable import rename_durably, write_all
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import after_seconds, is_final
from fleetdistill.wire.compression import unpack
from fleetdistill.wire.digests import Check
from fleetdistill.wire.payload import chunk_data
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

__all__ = ["BytesSource", "check_payload"]

DOWNLOADS = "downloads"
"""Folder in the state directory."""
ATTEMPTS = 5
PAUSE_SECONDS = 0.2
_LENGTH_BYTES = 8


def download(link: Link, identity: service_pb2.Identity, sha256: bytes, max_bytes: int = MAX_SPOOL_BYTES) -> Payload:
    """Downloads a payload through a temporary file, which is deleted once it is mapped.

    Raises the same errors as `Downloads.fetch`.
    """
    import tempfile  # not needed by a device, whose downloads are in its state directory

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return Downloads(Path(folder), max_bytes).fetch(link, identity, sha256)


class Downloads:
    """The payloads that a device has downloaded, in a folder that only one process uses at a time.

    Args:
        folder: Folder of the payloads, created with the first download.
        max_bytes: Maximum size of one download's tensors, in bytes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._verified: set[bytes] = set()

    def fetch(self, link: Link, identity: service_pb2.Identity, sha256: bytes, keep: Collection[bytes] = ()) -> Payload:
        """Returns the payload with a digest, stored or downloaded. Deletes all others except those in `keep`.

        Args:
            link: Connection to the server.
            identity: Identity of the device.
            sha256: Digest of the payload, 32 bytes.
            keep: Digests of other payloads to keep.

        Raises:
            LinkError: The connection failed repeatedly, or the server temporarily refuses requests. Received bytes
                are kept for the next attempt.
            RefusedError: The server refuses the download.
            WireError: The received data do not match the digest.
            PayloadTooLargeError: The payload is larger than `max_bytes`.
            NoRoomError: The disk has no room for the payload.
            StateError: The folder cannot be used.
        """
        self._keep_only({sha256, *keep})
        stored = self.stored(sha256)
        if stored is not None:
            return stored
        for attempt in range(ATTEMPTS):
            try:
                return self._fetch(link, identity, sha256, durably=sha256 in keep)
            except LinkError as error:
                # `Device.run` makes longer pauses, because `Device.stop` can interrupt them.
                if attempt + 1 == ATTEMPTS or error.after_seconds:
                    raise
                # A restart of the server takes a few seconds.
                pause(PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: the retry loop ended without a result")

    def stored(self, sha256: bytes) -> Payload | None:
        """Returns a stored payload, memory-mapped, or None if it is not complete; deletes a damaged one."""
        path = self._path(sha256, "payload")
        with disk_errors(self._folder):
            with contextlib.suppress(DecodeError, ValueError, WireError):
                return self._verify_once(*_map_file(path), sha256) if path.exists() else None
            path.unlink(missing_ok=True)  # the mapping is closed by now: Windows cannot delete a mapped file
            return None

    def _verify_once(self, header: knowledge_pb2.PayloadHeader, data: memoryview, sha256: bytes) -> Payload:
        """Returns the payload; verifies its digest only at its first use in this process."""
        if sha256 in self._verified:
            return _payload(header, data, sha256)
        payload = check_payload(header, data, sha256)
        self._verified.add(sha256)
        return payload

    def _keep_only(self, digests: Collection[bytes]) -> None:
        if not self._folder.exists():
            return
        wanted = {digest.hex() for digest in digests}
        with disk_errors(self._folder):
            for path in self._folder.iterdir():
                if path.stem not in wanted:
                    with contextlib.suppress(PermissionError):  # Windows cannot delete a file while it is mapped
                        path.unlink(missing_ok=True)

    def _fetch(self, link: Link, identity: service_pb2.Identity, sha256: bytes, *, durably: bool) -> Payload:
        part = _Part(self._path(sha256, "part"), self._max_bytes)
        try:
            with _transient_refusals(), disk_errors(self._folder):
                header, chunks = link.download(identity, sha256, part.length)
                if header.sha256 != sha256:
                    part.reject(_other_payload(header, sha256))
                digest = part.take(header, chunks)
            if not digest.matches():
                part.reject(_mismatch(digest))
        except (NoRoomError, LinkError, WireError) as error:
            if part.is_rejected or isinstance(error, NoRoomError):
                part.drop()
            raise
        path = self._path(sha256, "payload")
        with disk_errors(self._folder):
            if durably:  # ONNX files may refer to it
                rename_durably(part.path, path)
            else:
                part.path.replace(path)
            self._verified.add(sha256)
            return self._verify_once(*_map_file(path), sha256)

    def _path(self, sha256: bytes, kind: str) -> Path:
        return self._folder / f"{sha256.hex()}.{kind}"


@contextlib.contextmanager
def _transient_refusals() -> Iterator[None]:
    """Converts transient refusals to LinkError, such as the refusal of a stream that was too slow."""
    try:
        yield
    except RefusedError as refusal:
        if is_final(refusal.code):
            raise
        raise LinkError(str(refusal), after_seconds(refusal.details)) from refusal


class _Part:
    """An incomplete download in its file, with `length` data bytes so far."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._header: knowledge_pb2.PayloadHeader | None = None
        self.length = 0
        self.is_rejected = False
        with disk_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError, DecodeError, ValueError):
                self._header, data = _map_file(path)
                self.length = len(data)
        self._resumed = self.length > 0

    def take(self, header: knowledge_pb2.PayloadHeader, chunks: Iterator[wire.AnyChunk]) -> Check:
        """Appends the received chunks; returns the check of the complete payload."""
        self._check(header)
        running = Check(header)
        with self.path.open("ab" if self._resumed else "wb", buffering=0) as file:
            if self._resumed:
                running.update(_map_file(self.path)[1])
            else:
                _write_header(file, header)
            for chunk in chunks:
                data = self._checked(chunk, header.data_bytes)
                running.update(data)
                write_all(file, data)
                self.length += len(data)
        if self.length < header.data_bytes:
            raise LinkError(f"a download ended after {self.length} of {header.data_bytes} bytes; a retry resumes there")
        return running

    def _check(self, header: knowledge_pb2.PayloadHeader) -> None:
        if header.data_bytes > self._max_bytes:
            raise PayloadTooLargeError(header.data_bytes, self._max_bytes, "raise Budgets(spool_bytes=...)")
        if wire.data_bytes(header.parts) != header.data_bytes:
            tensors = wire.data_bytes(header.parts)
            self.reject(f"a download of {header.data_bytes} bytes declares tensors of {tensors} bytes")
        if self._resumed and (header != self._header or self.length > header.data_bytes):
            self.reject("a resumed download has a different header than before")
        missing = header.data_bytes - self.length
        free = free_bytes(self.path.parent)
        if missing > free:
            raise NoRoomError(f"a download needs {missing} more bytes, but the disk has {free} bytes free")

    def _checked(self, chunk: wire.AnyChunk, data_bytes: int) -> wire.Data:
        sent = chunk.data  # every access to the field copies it
        if wire.checksum(sent) != chunk.crc32c:
            raise LinkError("a downloaded chunk does not match its CRC-32C; it is downloaded again")
        data = unpack(sent, chunk.compression, wire.CHUNK_BYTES)
        if not data:
            self.reject("a download has an empty chunk")
        if self.length + len(data) > data_bytes:
            self.reject(f"a download has more than its {data_bytes} bytes")
        return data

    def reject(self, reason: str) -> None:
        """Raises WireError, or LinkError if the download was resumed, since the file may be damaged.

        The caller deletes the download after its file is closed, because Windows cannot delete an open file.
        """
        self.is_rejected = True
        raise LinkError(f"{reason}; it starts again") if self._resumed else WireError(reason)

    def drop(self) -> None:
        """Deletes the download."""
        with disk_errors(self.path.parent):
            self.path.unlink(missing_ok=True)


def _write_header(file: RawIOBase, header: knowledge_pb2.PayloadHeader) -> None:
    data = header.SerializeToString()
    write_all(file, len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def _map_file(path: Path) -> tuple[knowledge_pb2.PayloadHeader, memoryview]:
    """Returns header and data of a file, mapped. Raises ValueError or DecodeError if its header is incomplete."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    if len(view) < max(start, _LENGTH_BYTES):
        raise ValueError(f"{path} ends within its header")
    return knowledge_pb2.PayloadHeader.FromString(bytes(view[_LENGTH_BYTES:start])), view[start:]


def check_payload(header: knowledge_pb2.PayloadHeader, data: bytes | memoryview, sha256: bytes) -> Payload:
    """Returns the payload of a header and its data. Raises WireError if they do not match the digest."""
    if header.sha256 != sha256:
        raise WireError(_other_payload(header, sha256))
    check = Check(header)
    check.update(data)
    if not check.matches():
        raise WireError(_mismatch(check))
    return _payload(header, data, sha256)


def _other_payload(header: knowledge_pb2.PayloadHeader, sha256: bytes) -> str:
    return f"a download is payload {header.sha256.hex()[:16]}..., expected {sha256.hex()[:16]}..."


def _mismatch(check: Check) -> str:
    title = check.algorithm.label
    result = check.found().hex()[:16]
    expected = check.expected.hex()[:16]
    return f"a download has {title} {result}..., expected {expected}..."


def _payload(header: knowledge_pb2.PayloadHeader, data: bytes | memoryview, sha256: bytes) -> Payload:
    """Returns a payload. Raises WireError if its data and tensors differ in size, even if the digest matches."""
    payload = Payload(header.parts, wire.slots(header.parts), BytesSource(data), sha256, header.blake3)
    if payload.data_bytes != len(data):
        raise WireError(f"a download of {len(data)} bytes declares tensors of {payload.data_bytes} bytes")
    return payload


class BytesSource:
    """Data of a payload in memory or in a mapped file."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes, beginning at `start`."""
        return bytes(self._data[start : start + size])


class MemoryDownloads(Downloads):
    """Receives payloads without files.

    Args:
        link: The device's link; one that shares the server's process hands its payloads over as they are.
    """

    def __init__(self, link: Link) -> None:
        self._giver = link if isinstance(link, HandsOver) else None

    def fetch(self, link: Link, identity: service_pb2.Identity, sha256: bytes, keep: Collection[bytes] = ()) -> Payload:
        """Returns a payload of the server. Raises the errors of `Downloads.fetch`."""
        if self._giver is not None:
            return self._giver.hand_over(identity, sha256)
        header, chunks = link.download(identity, sha256, 0)
        return check_payload(header, b"".join(chunk_data(chunk) for chunk in chunks), sha256)

    def stored(self, sha256: bytes) -> Payload | None:
        """Returns None."""
        return None
