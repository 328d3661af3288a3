"""Fields of encoded protobuf messages, read and written without the package protobuf, for ONNX files."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_FIELDS = (1 << 29) - 1
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def fields_of(message: memoryview) -> Iterator[tuple[int, memoryview | int, memoryview]]:
    """Yields number, value and encoding of each field of a protobuf message, without copying."""
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        number, wire_type = key >> 3, key & 7
        if number > _MAX_FIELDS:  # other readers drop the high bits, and read another field
            raise ValueError(f"a field has number {number}, must be at most {_MAX_FIELDS}")
        if wire_type == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value, message[start:at]
            continue
        if wire_type == _LENGTH:
            size, at = _read_varint(message, at)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"a field has unsupported wire type {wire_type}, expected 0, 1, 2 or 5")
        if at + size > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + size], message[start : at + size]
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a protobuf varint is longer than 10 bytes")


def field(number: int, data: bytes) -> bytes:
    """Returns a field of a protobuf message, a text or a message."""
    return b"".join((varint(number << 3 | _LENGTH), varint(len(data)), data))


def varint(number: int) -> bytes:
    """Returns a number as protobuf encodes it."""
    low = bytes([number & 0x7F])
    return low if number < 0x80 else bytes([low[0] | 0x80]) + varint(number >> 7)
