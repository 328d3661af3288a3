"""ONNX files that refer to weights which the state directory has anyway, as ONNX's external data.

onnxruntime loads such a file by its path in the state directory. Its digest is that of the whole file, weights
included, which `whole` returns to the byte.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetdistill.deployment.stamp import check_stamp
from fleetdistill.errors import ModelError
from fleetdistill.state.weights import SharedWeights
from fleetdistill.wire.protobuf_fields import field, fields_of, varint

_GRAPH, _INITIALIZER = 7, 5  # ModelProto.graph, GraphProto.initializer
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14  # of TensorProto
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_EXTERNAL = bytes([_DATA_LOCATION << 3]) + varint(1)
_KNOWN = re.compile(r"weights/[0-9a-f]{64}|downloads/[0-9a-f]{64}\.payload")


def referring(data: bytes, shared: SharedWeights) -> bytes:
    """Returns an ONNX file that refers to shared weights instead of having them; unchanged if it has none."""

    def refer(tensor: memoryview) -> Iterator[bytes | memoryview]:
        for number, value, encoded in fields_of(tensor):
            raw = bytes(value) if number == _RAW_DATA and isinstance(value, memoryview) else b""
            place = shared.find(raw)
            if place is None:
                yield encoded
                continue
            for key, text in (("location", place[0]), ("offset", place[1]), ("length", len(raw))):
                entry = field(_KEY, key.encode()) + field(_VALUE, str(text).encode())
                yield field(_EXTERNAL_DATA, entry)
            yield _EXTERNAL

    return _with_initializers(data, refer)


def refers(data: bytes) -> bool:
    """Returns whether an ONNX file refers to weights in other files."""
    return any(
        number == _DATA_LOCATION
        for graph in _within(memoryview(data), _GRAPH)
        for tensor in _within(graph, _INITIALIZER)
        for number, _, _ in fields_of(tensor)
    )


def whole(data: bytes, directory: Path) -> bytes:
    """Returns an ONNX file of a state directory with the shared weights that it refers to.

    References to anything else remain, and so does a file that is not ONNX; what loads the file refuses both.

    Raises:
        ModelError: A file with its weights cannot be read, or is too short.
    """
    try:
        return _with_initializers(data, lambda tensor: _inlined(tensor, directory)) if refers(data) else data
    except (LookupError, ValueError):
        return data


def is_complete(path: Path) -> bool:
    """Returns whether a file of a state directory can be read and ends with the digest of its content."""
    try:
        check_stamp(whole(path.read_bytes(), path.parent))
    except (ModelError, OSError):
        return False
    return True


def _inlined(tensor: memoryview, directory: Path) -> Iterator[bytes | memoryview]:
    entries: dict[str, str] = {}
    waiting: list[memoryview] = []  # the fields of a reference, until its end
    for number, value, encoded in fields_of(tensor):
        if number == _EXTERNAL_DATA and isinstance(value, memoryview):
            key, text = (bytes(item).decode() for _, item, _ in fields_of(value) if isinstance(item, memoryview))
            entries[key] = text
            waiting.append(encoded)
            continue
        if number == _DATA_LOCATION and _KNOWN.fullmatch(entries.get("location", "")):
            yield field(
                _RAW_DATA, _read(directory, entries["location"], int(entries["offset"]), int(entries["length"]))
            )
        else:
            yield from (*waiting, encoded)
        waiting = []
    yield from waiting


def _read(directory: Path, name: str, offset: int, length: int) -> bytes:
    path = directory / name
    if not path.is_file():
        raise ModelError(f"the weights in {name}, to which the file refers, are missing")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            result = content[offset : offset + length]
    except OSError as error:
        raise ModelError(f"the weights in {name}, to which the file refers, cannot be read: {error}") from error
    if len(result) != length:
        raise ModelError(f"{name}, to which the file refers for its weights, is incomplete")
    return result


def _within(message: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, value, _ in fields_of(message):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _with_initializers(data: bytes, edit: Callable[[memoryview], Iterator[bytes | memoryview]]) -> bytes:
    """Returns an ONNX file whose initializers have the fields that a function makes of theirs."""
    return _edited(memoryview(data), (_GRAPH, _INITIALIZER), edit)


def _edited(
    message: memoryview, path: tuple[int, ...], edit: Callable[[memoryview], Iterator[bytes | memoryview]]
) -> bytes:
    if not path:
        return b"".join(edit(message))
    return b"".join(
        field(number, _edited(value, path[1:], edit))
        if number == path[0] and isinstance(value, memoryview)
        else encoded
        for number, value, encoded in fields_of(message)
    )
