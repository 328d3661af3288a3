"""The messages that carry chunks, as bytes, without a protobuf message on the way: each would copy the data again.

`UploadRequest` and `DownloadResponse` have their chunk in a field of the same number, so their bytes are the same.
"""

from __future__ import annotations

from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import knowledge_pb2

# Number of a field, and that its value has a length: `UploadRequest.chunk` and `TensorChunk.data`.
_CHUNK, _DATA = bytes([2 << 3 | 2]), bytes([3 << 3 | 2])


def framed(chunk: AnyChunk) -> bytes:
    """`UploadRequest(chunk=chunk).SerializeToString()`, but for the order of the fields, with one copy of the data."""
    head = knowledge_pb2.TensorChunk(
        tensor=chunk.tensor, offset=chunk.offset, crc32c=chunk.crc32c, compression=chunk.compression
    ).SerializeToString()
    data = chunk.data
    head += _DATA + _varint(len(data))
    return b"".join((_CHUNK, _varint(len(head) + len(data)), head, data))


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first, the top bit set on all but the last."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
