"""Hostile messages: a valid one, changed somewhere by somebody who has read the protos, or by nobody at all.

Every choice is drawn from one `Random`, so a seed names a message; hypothesis draws and shrinks through the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)

_WHOLE = [0, 1, 2, -1, 63, 64, 127, 128, 255, 10_000, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 56, 1 << 62]
_REAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf]
_TEXT = ["", "a", "cut", "knowledge", "../../etc/passwd", "/dev/null", "a/b", "x" * 300, "\x00", "\n", "Ж", "d1", "%s"]
_RANGES: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
_MANY = [2, 3, 17, 200]
_VERY_MANY = 10_001  # tensors, one more than a payload may have
_HOW_OFTEN_VERY_MANY = 2_000


def hostile(random: Random, valid: M) -> M:
    """A changed copy of a valid message; some come out valid after all.

    Args:
        random: Decides everything.
        valid: What to begin with; it is left as it is.
    """
    if random.random() < 0.15:
        return _mangled(random, valid)
    changed = type(valid).FromString(valid.SerializeToString())
    for _ in range(random.choice([1, 1, 1, 2, 3, 8])):
        _change(random, changed)
    return changed


def swollen(random: Random, valid: M) -> M:
    """A copy in which everything that has rows has far more of them, and the same number everywhere."""
    changed = type(valid).FromString(valid.SerializeToString())
    rows = 1 << random.choice([12, 20, 31, 40, 50])
    for tensor in _tensors(changed):
        if len(tensor.shape):
            tensor.shape[0] = rows
    return changed


def _tensors(message: Message) -> Iterator[Any]:
    if message.DESCRIPTOR.name == "Tensor":
        yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _tensors(inner)


def mangled_bytes(random: Random, data: bytes) -> bytes:
    """Bytes with bits flipped, cut off, doubled or made up."""
    result = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        _MANGLES[random.randrange(len(_MANGLES))](random, result)
    return bytes(result)


def _mangled(random: Random, valid: M) -> M:
    """What is left of a message whose bytes were changed; the valid one where nothing can be read any more."""
    data = mangled_bytes(random, valid.SerializeToString())
    try:
        return type(valid).FromString(data)
    except DecodeError:
        return type(valid).FromString(valid.SerializeToString())


def _flip(random: Random, data: bytearray) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(random: Random, data: bytearray) -> None:
    del data[random.randrange(len(data) + 1) :]


def _double(random: Random, data: bytearray) -> None:
    start = random.randrange(len(data) + 1)
    data += data[start : start + random.randrange(64)]


def _make_up(random: Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.randbytes(random.randrange(1, 12))


_MANGLES: list[Callable[[Random, bytearray], None]] = [_flip, _cut, _double, _make_up]


def _change(random: Random, message: Message) -> None:
    """Goes down to some field and changes it."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    change_field(random, message, random.choice(present if present and random.random() < 0.8 else fields))  # type: ignore[arg-type]


def change_field(random: Random, message: Message, field: FieldDescriptor) -> None:
    """Changes one field of a message, or something within it."""
    if field.is_repeated:
        _change_repeated(random, message, field)
    elif field.message_type is not None:
        _change_message(random, message, field)
    else:
        setattr(message, field.name, _value(random, field, getattr(message, field.name)))


def _change_message(random: Random, message: Message, field: FieldDescriptor) -> None:
    if random.random() < 0.1:
        message.ClearField(field.name)
        return
    inner = getattr(message, field.name)
    inner.SetInParent()  # of a oneof this is perhaps the wrong one
    _change(random, inner)


def _change_repeated(random: Random, message: Message, field: FieldDescriptor) -> None:
    items = getattr(message, field.name)
    deed = random.random()
    if deed < 0.15 and len(items):
        del items[random.randrange(len(items))]
    elif deed < 0.3:
        _repeat(random, items, field)
    elif field.message_type is None:
        _change_scalars(random, items, field)
    else:
        _change(random, items[random.randrange(len(items))] if len(items) else items.add())


def _repeat(random: Random, items: Any, field: FieldDescriptor) -> None:
    """Appends copies of an item: the same name twice, or far too many."""
    if not len(items):
        return
    item = items[random.randrange(len(items))]
    many = _VERY_MANY if random.randrange(_HOW_OFTEN_VERY_MANY) == 0 else random.choice(_MANY)
    for _ in range(many):
        items.add().CopyFrom(item) if field.message_type is not None else items.append(item)


def _change_scalars(random: Random, items: Any, field: FieldDescriptor) -> None:
    at = random.randrange(len(items) + 1)
    if at == len(items):
        items.append(_value(random, field, items[-1] if len(items) else _nothing(field)))
    else:
        items[at] = _value(random, field, items[at])


def _nothing(field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"" if field.type == FieldDescriptor.TYPE_BYTES else ""
    return 0


def _value(random: Random, field: FieldDescriptor, old: Any) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        wanted = random.choice([random.choice(_WHOLE), low, high, old + 1, old - 1, old * 8, random.randint(low, high)])
        return min(max(wanted, low), high)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(_REAL)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not old
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice([b"", mangled_bytes(random, old), random.randbytes(32)])
    return random.choice([*_TEXT, old + "a", old[:-1]])
