"""Digests of payloads: SHA-256, or BLAKE3, which takes a third of the time, where both ends have the package `blake3`.

A digest covers the serialized parts, then the data of all tensors. The package is the extra `blake3` of the SDK and a
dependency of the server.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from fleetdistill.errors import WireError
from fleetdistill.wire.v1 import knowledge_pb2

__all__ = ["digest", "identity"]

DIGEST_BYTES = 32


class Algorithm(StrEnum):
    """Algorithm of a digest; the value is the digest's field in `PayloadHeader`."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"

    @property
    def label(self) -> str:
        """Name for messages."""
        return "SHA-256" if self is Algorithm.SHA256 else "BLAKE3"


class Hasher(Protocol):
    """A digest in progress."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Adds data."""

    def digest(self) -> bytes:
        """Returns the digest of all data so far, 32 bytes."""


@functools.cache
def has_blake3() -> bool:
    """Returns whether this process can compute BLAKE3."""
    return importlib.util.find_spec("blake3") is not None


def hasher(parts: knowledge_pb2.Parts, algorithm: Algorithm = Algorithm.SHA256) -> Hasher:
    """Returns a digest that covers the parts so far; add the data of all tensors in order."""
    serialized = parts.SerializeToString(deterministic=True)
    if algorithm is Algorithm.SHA256:
        return hashlib.sha256(serialized)
    import blake3

    result: Hasher = blake3.blake3(serialized)
    return result


def digest(
    parts: knowledge_pb2.Parts, data: Iterable[bytes | memoryview], algorithm: Algorithm = Algorithm.SHA256
) -> bytes:
    """Returns the digest of parts and data, which identifies a payload."""
    running = hasher(parts, algorithm)
    for piece in data:
        running.update(piece)
    return running.digest()


class Check:
    """Compares the data of a payload with the digest in its header, piece by piece.

    Args:
        header: The payload's header. BLAKE3 is compared if the header has it and this process can compute it.

    Attributes:
        algorithm: Algorithm of the digest that is compared.
        expected: The digest.

    Raises:
        WireError: The header has no digest that this process can compare.
    """

    def __init__(self, header: knowledge_pb2.PayloadHeader) -> None:
        self.algorithm = Algorithm.BLAKE3 if header.blake3 and has_blake3() else Algorithm.SHA256
        self.expected: bytes = getattr(header, self.algorithm)
        if len(self.expected) != DIGEST_BYTES:
            text = f"the header's {self.algorithm.label} has {len(self.expected)} bytes, expected {DIGEST_BYTES}"
            raise WireError(text if self.expected or not header.blake3 else _MISSING)
        self._running = hasher(header.parts, self.algorithm)

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next data."""
        self._running.update(data)

    def found(self) -> bytes:
        """Returns the digest of the parts and the data so far."""
        return self._running.digest()

    def matches(self) -> bool:
        """Returns whether the parts and the data so far have the header's digest."""
        return self.found() == self.expected


_MISSING = "the payload has only a BLAKE3 digest, which this process cannot compute; pip install 'fleetdistill[blake3]'"


def identity(header: knowledge_pb2.PayloadHeader) -> bytes:
    """Returns the digest that identifies a payload in asks, receipts and stores: BLAKE3 only without SHA-256."""
    return header.sha256 or header.blake3
