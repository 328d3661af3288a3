"""Fetching payloads: checked chunk by chunk, resumed where a broken connection left off."""

from __future__ import annotations

import random
import time

import google_crc32c

from fleetdistill.errors import LinkError, PayloadTooLargeError, WireError
from fleetdistill.link import Link
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

ATTEMPTS = 5
_PAUSE_SECONDS = 0.2
MAX_DOWNLOAD_BYTES = 4 << 30


def download(link: Link, identity: service_pb2.Identity, sha256: bytes) -> Payload:
    """Fetches a payload by its digest into memory.

    Raises:
        LinkError: The connection broke again and again.
        WireError: What came is not what the digest names.
        PayloadTooLargeError: It is larger than a device takes.
    """
    data = bytearray()
    for attempt in range(ATTEMPTS):
        try:
            header = _fetch(link, identity, sha256, data)
            return checked(header, bytes(data), sha256)
        except LinkError:
            if attempt + 1 == ATTEMPTS:
                raise
            # What came so far stays; a server that restarts needs a few seconds.
            time.sleep(_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


def _fetch(link: Link, identity: service_pb2.Identity, sha256: bytes, data: bytearray) -> knowledge_pb2.PayloadHeader:
    header, chunks = link.download(identity, sha256, len(data))
    if header.data_bytes > MAX_DOWNLOAD_BYTES:
        raise PayloadTooLargeError(header.data_bytes, MAX_DOWNLOAD_BYTES)
    for chunk in chunks:
        if google_crc32c.value(chunk.data) != chunk.crc32c:
            raise LinkError("a downloaded chunk fails its CRC-32C; fetching it again")
        data += chunk.data
    if len(data) < header.data_bytes:
        raise LinkError(f"a download ended after {len(data)} of {header.data_bytes} bytes; going on from there")
    return header


def checked(header: knowledge_pb2.PayloadHeader, data: bytes, sha256: bytes) -> Payload:
    """The payload of a header and its data. Raises WireError unless they are what the digest names."""
    found = wire.digest(header.parts, iter([data]))
    if found != sha256:
        raise WireError(f"a download has SHA-256 {found.hex()[:16]}..., asked for {sha256.hex()[:16]}...")
    return Payload(header.parts, wire.slots(header.parts), BytesSource(data), sha256)


class BytesSource:
    """A payload's data in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on."""
        return self._data[start : start + size]
