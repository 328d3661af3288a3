"""The fields of protobuf messages, looked up once per message type: reading a descriptor takes microseconds a field."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from google.protobuf.message import Message


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        name: Name of the field.
        message: Name of the type of its messages; None for a field of scalars.
        is_repeated: Whether it has a list of values.
    """

    name: str
    message: str | None
    is_repeated: bool


@functools.cache
def fields_of(kind: type[Message]) -> tuple[Field, ...]:
    """Returns the fields of a message type, ordered by field number."""
    described: list[Any] = sorted(kind.DESCRIPTOR.fields, key=lambda one: one.number)
    return tuple(
        Field(item.name, item.message_type.name if item.message_type else None, item.is_repeated) for item in described
    )


@functools.cache
def has_tensors(kind: type[Message]) -> bool:
    """Returns whether messages of a type can contain tensors, at any depth."""
    return _describes_tensors(kind.DESCRIPTOR, frozenset())


def _describes_tensors(descriptor: Any, seen: frozenset[str]) -> bool:
    if descriptor.name in ("Tensor", "NamedTensor"):
        return True
    known = seen | {descriptor.full_name}
    inner = [field.message_type for field in descriptor.fields if field.message_type]
    return any(_describes_tensors(item, known) for item in inner if item.full_name not in known)
