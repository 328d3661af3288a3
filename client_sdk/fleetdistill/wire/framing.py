"""Serializes and parses messages with chunks directly, because protobuf would copy the data once or twice more.

`UploadRequest` and `DownloadResponse` have their chunk in fields of the same number, so their bytes are identical.
"""

from __future__ import annotations

from typing import TypeVar

from fleetdistill.wire.payload import AnyChunk, Chunk
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

__all__ = ["frame"]

Message = TypeVar("Message", service_pb2.UploadRequest, service_pb2.DownloadResponse)

# Wire types of protobuf, and the tags (field number and wire type) of `UploadRequest.chunk` and `Chunk.data`.
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_CHUNK, _DATA = bytes([2 << 3 | _DELIMITED]), bytes([2 << 3 | _DELIMITED])
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
# Longest length of a field that is read here: a varint of four bytes.
_MAX_BITS = 28


def frame(chunk: AnyChunk) -> bytes:
    """Returns `UploadRequest(chunk=chunk).SerializeToString()`, up to field order, with one copy of the data."""
    fields = knowledge_pb2.Chunk(offset=chunk.offset, crc32c=chunk.crc32c, compression=chunk.compression)
    head = fields.SerializeToString()
    data = chunk.data
    head += _DATA + _varint(len(data))
    return b"".join((_CHUNK, _varint(len(head) + len(data)), head, data))


def unframe(message: bytes, kind: type[Message]) -> Chunk | Message:
    """Parses a message of an upload or a download; the data of a chunk is a view of the message's bytes.

    Raises:
        google.protobuf.message.DecodeError: The bytes are not a message of this kind.
    """
    result = _chunk_in(message)
    if result is not None:
        return result
    parsed = kind.FromString(message)  # the header, or a chunk in a form that only other serializers write
    return _as_chunk(parsed.chunk, parsed.chunk.data) if parsed.HasField("chunk") else parsed


def _chunk_in(message: bytes) -> Chunk | None:
    """Returns the chunk of a message that has one field, a chunk with its data once; None for any other message."""
    size, start = _length_at(message, 1)
    if message[:1] != _CHUNK or size is None or start + size != len(message):
        return None
    place = _data_in(message, start)
    if place is None:
        return None
    tag, begin, end = place
    rest = knowledge_pb2.Chunk.FromString(message[start:tag] + message[end:])
    return _as_chunk(rest, memoryview(message)[begin:end])


def _as_chunk(fields: knowledge_pb2.Chunk, data: bytes | memoryview) -> Chunk:
    return Chunk(fields.offset, data, fields.crc32c, fields.compression)


def _data_in(message: bytes, at: int) -> tuple[int, int, int] | None:
    """Returns the positions of the tag, the first byte and the end of `Chunk.data`, if it occurs once."""
    result = None
    while at < len(message):
        tag, kind = at, message[at] & 7
        if message[tag] > 0x7F:  # a field number above 15, which `Chunk` does not have
            return None
        at += 1
        if kind == _DELIMITED:
            size, at = _length_at(message, at)
            if size is None or (message[tag] == _DATA[0] and result is not None):
                return None
            if message[tag] == _DATA[0]:
                result = tag, at, at + size
            at += size
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        elif kind == _VARINT:
            at = _after_varint(message, at)
        else:
            return None
    return result if at == len(message) else None


def _length_at(message: bytes, at: int) -> tuple[int | None, int]:
    """Returns a length and the position after it; None instead of a length that is incomplete or too long."""
    number = 0
    for shift in range(0, _MAX_BITS, 7):
        if at >= len(message):
            break
        number |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] <= 0x7F:
            return number, at
    return None, at


def _after_varint(message: bytes, at: int) -> int:
    while at < len(message) and message[at] > 0x7F:
        at += 1
    return at + 1


def _varint(number: int) -> bytes:
    """Returns a number as a protobuf varint."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)
