"""Every field of a message, found in its descriptors, and changes to one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from fuzz.hostile import M, change_field
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Path = tuple[FieldDescriptor, ...]
"""Fields from a message down to one within it."""


def paths(message: Descriptor, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """A path to every field, also within messages within; a message within one of its own kind is not gone into."""
    for field in message.fields:
        yield (field,)
        inner = field.message_type
        if inner is not None and inner.full_name not in (*above, message.full_name):
            for rest in paths(inner, (*above, message.full_name)):
                yield (field, *rest)


def in_order(message: Descriptor) -> list[Path]:
    """All paths of a message, first one to each field that no path before it leads to."""
    result: dict[str, list[Path]] = {}
    for path in paths(message):
        result.setdefault(name_of(path), []).append(path)
    return [first for first, *_ in result.values()] + [path for _, *rest in result.values() for path in rest]


def names(roots: Sequence[Descriptor]) -> set[str]:
    """`Message.field` of every field that can be reached."""
    return {name_of(path) for root in roots for path in paths(root)}


def name_of(path: Path) -> str:
    """`Message.field` of a path's last field."""
    return f"{path[-1].containing_type.name}.{path[-1].name}"  # type: ignore[union-attr]


def changed_at(random: Random, valid: M, path: Path) -> M:
    """A copy of a message with a change at a path; what is not there on the way is made."""
    changed = type(valid).FromString(valid.SerializeToString())
    message: Message = changed
    for field in path[:-1]:
        inner: Any = getattr(message, field.name)
        if field.is_repeated:
            message = random.choice(inner) if len(inner) else inner.add()
        else:
            inner.SetInParent()
            message = inner
    change_field(random, message, path[-1])
    return changed
