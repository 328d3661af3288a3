"""Golden bytes of every message of the wire, with every field set: rewrites all of them.

    python tests/wire/golden/make.py

Of each message `messages/<name>.bin` holds the bytes, with two elements in each repeated field, and
`messages/<name>.textproto` what they say. A message with a oneof has a pair of files for each of its fields.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import fleetdistill.wire.v1 as package

FOLDER = Path(__file__).parent / "messages"
_DEEPEST = 6  # messages within messages; none of ours contains itself


def messages() -> dict[str, type[Message]]:
    """Every message type of the package by its name, nested ones with the outer name before a dot."""
    modules = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name.endswith("_pb2")]
    result: dict[str, type[Message]] = {}
    for name in modules:
        file = importlib.import_module(f"{package.__name__}.{name}").DESCRIPTOR
        for descriptor in file.message_types_by_name.values():
            result |= _with_nested(descriptor)
    return dict(sorted(result.items()))


def _with_nested(descriptor: Descriptor, outer: str = "") -> dict[str, type[Message]]:
    name = f"{outer}{descriptor.name}"
    result = {name: message_factory.GetMessageClass(descriptor)}
    for type_name in descriptor.nested_types:
        result |= _with_nested(type_name, f"{name}.")
    return result


def samples(cls: type[Message]) -> Iterator[tuple[str, Message]]:
    """The message with every field set; once for each choice of its oneof, with the choice's name."""
    choices = [field.name for oneof in _oneofs(cls.DESCRIPTOR) for field in oneof.fields]  # type: ignore[arg-type]
    for choice in choices or [""]:
        yield choice, _filled(cls, choice)


def _oneofs(descriptor: Descriptor) -> list[Any]:
    return [oneof for oneof in descriptor.oneofs if not (len(oneof.fields) == 1 and oneof.name.startswith("_"))]


def _filled(cls: type[Message], choice: str = "", depth: int = 0) -> Message:
    message = cls()
    in_oneof = {field.name for oneof in _oneofs(cls.DESCRIPTOR) for field in oneof.fields}  # type: ignore[arg-type]
    first = next(iter(sorted(in_oneof)), "")
    for field in cls.DESCRIPTOR.fields:
        if field.name not in in_oneof or field.name == (choice or first):
            _fill(message, field, depth)  # type: ignore[arg-type]
    return message


def _fill(message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        cls = message_factory.GetMessageClass(field.message_type)
        value = _filled(cls, depth=depth + 1) if depth < _DEEPEST else cls()
        target = getattr(message, field.name)
        target.extend([value, cls()]) if field.is_repeated else target.CopyFrom(value)
        if not field.is_repeated:
            target.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).extend([_value(field), _value(field, 1)])
    else:
        setattr(message, field.name, _value(field))


def _value(field: FieldDescriptor, more: int = 0) -> Any:
    """A value that has all of its type's bytes, such as one beyond 32 bits; another one for `more`."""
    number = field.number + more
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return bytes([0xFF, 0, number]) if field.type == FieldDescriptor.TYPE_BYTES else f"{field.name} é{more}"
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[1 + more % (len(field.enum_type.values) - 1)].number  # type: ignore[union-attr]
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return -0.1 * number
        case FieldDescriptor.CPPTYPE_FLOAT:
            return struct.unpack("f", struct.pack("f", -0.1 * number))[0]
        case FieldDescriptor.CPPTYPE_INT64:
            return -(1 << 40) - number
        case FieldDescriptor.CPPTYPE_UINT64:
            return (1 << 63) + number
        case FieldDescriptor.CPPTYPE_INT32:
            return -(1 << 20) - number
        case _:
            return (1 << 31) + number


def stem(name: str, choice: str) -> str:
    """File name of a sample, without its ending."""
    return f"{name}-{choice}" if choice else name


def files() -> dict[str, Message]:
    """Every sample by its file name, without ending."""
    return {stem(name, choice): one for name, cls in messages().items() for choice, one in samples(cls)}


def main() -> None:
    """Writes the samples of today's code, and deletes all others."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, sample in files().items():
        (FOLDER / f"{name}.bin").write_bytes(sample.SerializeToString(deterministic=True))
        (FOLDER / f"{name}.textproto").write_text(text_format.MessageToString(sample, as_utf8=True))


if __name__ == "__main__":
    main()
