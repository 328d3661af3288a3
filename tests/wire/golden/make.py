"""Golden bytes of every message of the wire: adds those that are missing, and never rewrites one that is there.

    python tests/wire/golden/make.py                                        those of today's code
    python tests/wire/golden/make.py tests/wire/golden/v0.1.0/descriptors.binpb     those of a release

Run it after `make protos` has added a message or a field. Of each message `messages/<name>.bin` holds the bytes, with
every field set and two elements in each repeated one, and `messages/<name>.textproto` what they say. A message with a
oneof has a pair of files for each of its fields; a message that got new fields since has a new pair, `<name>+2`, beside
the old one, which stays as the older peers send it. `test_golden.py` holds today's code against all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

import fleetdistill.wire.v1 as package

FOLDER = Path(__file__).parent / "messages"
_DEEPEST = 6  # messages within messages; none of ours contains itself


def messages() -> dict[str, type[Message]]:
    """Every message type of the package by its name, nested ones with the outer name before a dot."""
    modules = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name.endswith("_pb2")]
    return _messages_in(importlib.import_module(f"{package.__name__}.{name}").DESCRIPTOR for name in modules)


def messages_of_release(descriptors: Path) -> dict[str, type[Message]]:
    """The same of a recorded FileDescriptorSet, in a pool of its own."""
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return _messages_in(pool.FindFileByName(file.name) for file in files)


def _messages_in(files: Iterable[FileDescriptor]) -> dict[str, type[Message]]:
    found: dict[str, type[Message]] = {}
    for file in files:
        for descriptor in file.message_types_by_name.values():
            found |= _with_nested(descriptor)
    return dict(sorted(found.items()))


def _with_nested(descriptor: Descriptor, outer: str = "") -> dict[str, type[Message]]:
    name = f"{outer}{descriptor.name}"
    found = {name: message_factory.GetMessageClass(descriptor)}
    for one in descriptor.nested_types:
        found |= _with_nested(one, f"{name}.")
    return found


def samples(cls: type[Message]) -> Iterator[tuple[str, Message]]:
    """The message with every field set; once for each choice of its oneof, with the choice's name."""
    choices = [one.name for oneof in _oneofs(cls.DESCRIPTOR) for one in oneof.fields]  # type: ignore[arg-type]
    for choice in choices or [""]:
        yield choice, _filled(cls, choice)


def _oneofs(descriptor: Descriptor) -> list[Any]:
    return [oneof for oneof in descriptor.oneofs if not (len(oneof.fields) == 1 and oneof.name.startswith("_"))]


def _filled(cls: type[Message], choice: str = "", depth: int = 0) -> Message:
    message = cls()
    in_oneof = {one.name for oneof in _oneofs(cls.DESCRIPTOR) for one in oneof.fields}  # type: ignore[arg-type]
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


def recorded(name: str) -> list[Path]:
    """The recorded bytes of a message, all its choices and the earlier forms of it."""
    return sorted(path for path in FOLDER.glob("*.bin") if path.stem.split("-")[0].split("+")[0] == name)


def stem(name: str, choice: str) -> str:
    """File name of a sample, without its ending."""
    return f"{name}-{choice}" if choice else name


def missing(name: str, cls: type[Message]) -> list[tuple[str, Message]]:
    """Samples of a message that no recorded bytes are: (file name, message)."""
    held = {path.read_bytes() for path in recorded(name)}
    wanted = [(stem(name, choice), sample) for choice, sample in samples(cls)]
    return [(file, sample) for file, sample in wanted if sample.SerializeToString(deterministic=True) not in held]


def main(release: Path | None = None) -> int:
    """Writes what is missing."""
    FOLDER.mkdir(exist_ok=True)
    for name, cls in (messages_of_release(release) if release else messages()).items():
        for file, sample in missing(name, cls):
            form = 1
            while (path := FOLDER / (f"{file}+{form}.bin" if form > 1 else f"{file}.bin")).exists():
                form += 1
            path.write_bytes(sample.SerializeToString(deterministic=True))
            path.with_suffix(".textproto").write_text(text_format.MessageToString(sample, as_utf8=True))
            print(f"added {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
