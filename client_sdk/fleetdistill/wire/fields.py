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
        Field(one.name, one.message_type.name if one.message_type else None, one.is_repeated) for one in described
    )


@functools.cache
def has_tensors(kind: type[Message]) -> bool:
    """Returns whether messages of a type can contain tensors, at any depth."""
    return _describes_tensors(kind.DESCRIPTOR, frozenset())


def _describes_tensors(descriptor: Any, seen: frozenset[str]) -> bool:
    if descriptor.name in ("Tensor", "NamedTensor"):
        return True
    known = seen | {descriptor.full_name}
    inner = [one.message_type for one in descriptor.fields if one.message_type]
    return any(_describes_tensors(one, known) for one in inner if one.full_name not in known)
