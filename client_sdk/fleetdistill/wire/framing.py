"""Serializes messages with chunks directly to bytes, because protobuf would copy the data once more.

`UploadRequest` and `DownloadResponse` have their chunk in fields of the same number, so their bytes are identical.
"""

from __future__ import annotations

from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import knowledge_pb2

# Tags (field number and wire type 2, length-delimited) of `UploadRequest.chunk` and `TensorChunk.data`.
_CHUNK, _DATA = bytes([2 << 3 | 2]), bytes([3 << 3 | 2])


def framed(chunk: AnyChunk) -> bytes:
    """Returns `UploadRequest(chunk=chunk).SerializeToString()`, up to field order, with one copy of the data."""
    head = knowledge_pb2.TensorChunk(
        tensor=chunk.tensor, offset=chunk.offset, crc32c=chunk.crc32c, compression=chunk.compression
    ).SerializeToString()
    data = chunk.data
    head += _DATA + _varint(len(data))
    return b"".join((_CHUNK, _varint(len(head) + len(data)), head, data))


def _varint(number: int) -> bytes:
    """Returns a number as a protobuf varint."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
