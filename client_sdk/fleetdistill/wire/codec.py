"""Converts between the classes of `fleetdistill.knowledge` and payloads (protobuf parts with their data).

One generic mapping by field names handles every kind, so a new kind requires only a message and a class.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import numpy as np
from google.protobuf.message import Message

from fleetdistill.errors import KnowledgeError, WireError
from fleetdistill.wire.digests import Algorithm, digest
from fleetdistill.wire.kind import Array, Kind, OwnForm, Parts, field_error, kind_of
from fleetdistill.wire.payload import (
    ELEMENT_TYPES,
    LARGEST,
    DataSource,
    Field,
    Slot,
    array_of,
    fields_of,
    pieces,
    quantize,
    slots,
)
from fleetdistill.wire.schema import FLOAT32, float_type, is_quantized
from fleetdistill.wire.v1 import knowledge_pb2, tensor_pb2

__all__ = ["Payload", "decode", "encode"]

KNOWLEDGE_TYPES = (
    tensor_pb2.ELEMENT_TYPE_FLOAT32,
    tensor_pb2.ELEMENT_TYPE_FLOAT16,
    tensor_pb2.ELEMENT_TYPE_UINT8,
)
"""Element types of knowledge that this version supports, for a device's profile."""


class ArraySource:
    """Arrays in memory as one contiguous range of bytes, without copying them together.

    Attributes:
        views: The bytes of each array.
    """

    def __init__(self, all_slots: tuple[Slot, ...], arrays: list[Array]) -> None:
        self._slots = all_slots
        self._starts = [slot.start for slot in all_slots]
        self.views = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from offset `start`, also across arrays."""
        result = [
            self.views[number][max(start - slot.start, 0) : max(start + size - slot.start, 0)]
            for number, slot in enumerate(self._slots)
            if slot.start < start + size and start < slot.stop
        ]
        return b"".join(result)

    def view(self, start: int, size: int) -> memoryview | bytes:
        """Returns the same bytes as `read`, read-only and without a copy if they are in one array."""
        number = bisect_right(self._starts, start) - 1
        if number < 0 or start + size > self._slots[number].stop:
            return self.read(start, size)
        offset = start - self._starts[number]
        return self.views[number][offset : offset + size].toreadonly()


@dataclass(frozen=True)
class Payload:
    """Parts and a source of their data. Decode it with `decode`.

    Attributes:
        parts: The typed parts; tensors have no data.
        slots: Position of each tensor in the data.
        source: Source of the data by offset.
        sha256: SHA-256 of parts and data, 32 bytes; empty if `blake3` identifies the payload.
        blake3: BLAKE3 of parts and data, 32 bytes, or empty.
    """

    parts: knowledge_pb2.Parts
    slots: tuple[Slot, ...]
    source: DataSource
    sha256: bytes
    blake3: bytes = b""

    @property
    def digest(self) -> bytes:
        """The digest that identifies the payload: SHA-256, or BLAKE3 if it is the only one."""
        return self.sha256 or self.blake3

    @property
    def data_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.slots[-1].stop if self.slots else 0

    @functools.cached_property
    def header_bytes(self) -> int:
        """Size of the header in bytes."""
        return self.header().ByteSize()

    def header(self) -> knowledge_pb2.PayloadHeader:
        """Returns the header that is sent before the chunks."""
        return knowledge_pb2.PayloadHeader(
            parts=self.parts, data_bytes=self.data_bytes, sha256=self.sha256, blake3=self.blake3
        )


def encode(
    parts: Parts, knowledge_type: np.dtype | type = np.float32, algorithm: Algorithm = Algorithm.SHA256
) -> Payload:
    """Encodes named parts to a payload.

    Args:
        parts: Part name to kind.
        knowledge_type: Element type of features, logits and other knowledge: float32 or float16; or uint8, with which
            feature columns of the device's samples are quantized by channel and everything else is float16.
        algorithm: Algorithm of the digest that identifies the payload.

    Raises:
        KnowledgeError: A value does not fit `knowledge_type`; the error names tensor and row.
        WireError: An array has an unsupported type, or a value does not fit its field.
    """
    message = knowledge_pb2.Parts()
    arrays: list[Array] = []
    for name, kind in parts.items():
        part = message.parts.add(name=name)
        target = getattr(part, kind.wire_name)
        target.SetInParent()
        wire_type = np.dtype(knowledge_type) if kind.wire_type is None else kind.wire_type
        _Encoder(arrays, wire_type, type(kind)).fill(target, kind, name)
    all_slots = slots(message)
    source = ArraySource(all_slots, arrays)
    result = digest(message, source.views, algorithm)
    digests = (result, b"") if algorithm is Algorithm.SHA256 else (b"", result)
    return Payload(message, all_slots, source, *digests)


def with_sha256(payload: Payload) -> Payload:
    """Returns a payload that its SHA-256 identifies, which is computed if necessary."""
    if payload.sha256:
        return payload
    return replace(payload, sha256=digest(payload.parts, pieces(payload.source, 0, payload.data_bytes)), blake3=b"")


def decode(payload: Payload, only: str | None = None) -> dict[str, Kind]:
    """Decodes a payload to named parts; arrays are read or mapped from its source, read-only.

    Args:
        payload: The payload.
        only: Name of the part to decode; None for all parts.
    """
    by_path = {slot.path: slot for slot in payload.slots}
    decoded: dict[str, Kind] = {}
    for part in payload.parts.parts:
        if only not in (None, part.name):
            continue
        kind = kind_of(part)  # `slots` has rejected a part without a known kind
        reader = _Decoder(by_path, payload.source)
        decoded[part.name] = reader.read(kind, getattr(part, kind.wire_name), part.name)
    return decoded


class _Encoder:
    def __init__(self, arrays: list[Array], wire_type: np.dtype, kind: type[Kind]) -> None:
        self._arrays = arrays
        self._wire_type = wire_type
        self._kind = kind

    def fill(self, message: Message, value: Any, path: str) -> None:
        if isinstance(value, OwnForm):
            value.fill(message, path)
            return
        for field in fields_of(type(message)):  # type: ignore[arg-type]  # mypy compares the hash of instances
            item = getattr(value, field.name)
            if item is not None:
                self._set(message, field, item, path)

    def _set(self, message: Message, field: Field, item: Any, path: str) -> None:
        if field.message is None:
            _set_scalar(message, field, item, path)
            return
        target, path = getattr(message, field.name), f"{path}/{field.name}"
        if field.message == "Tensor" and field.name in self._kind.exact:
            self._add(target, np.asarray(item, np.float64))
        elif field.message == "Tensor":
            self._describe(target, item, path)
        elif field.message == "NamedTensor":
            for name, array in item.items():
                self._describe(target.add(name=name).tensor, array, f"{path}/{name}", self._kind.quantized_features)
        elif field.is_repeated:
            for one in item:
                self.fill(target.add(), one, path)
        else:
            target.SetInParent()
            self.fill(target, item, path)

    def _describe(self, tensor: tensor_pb2.Tensor, array: Array, path: str, quantized: bool = False) -> None:
        array = np.asarray(array)
        if quantized and array.dtype.kind == "f" and is_quantized(self._wire_type, array.shape[1:]):
            self._describe_quantized(tensor, array, path)
        else:
            self._add(tensor, _to_wire_type(array, float_type(self._wire_type), path))

    def _describe_quantized(self, tensor: tensor_pb2.Tensor, array: Array, path: str) -> None:
        with np.errstate(over="ignore"):
            numbers = array.astype(FLOAT32, copy=False)
        _check_range(array, np.abs(numbers) <= LARGEST, "uint8", path)
        elements, step, minimum = quantize(numbers)
        self._add(tensor, elements)
        tensor.encoding = tensor_pb2.ENCODING_CHANNEL_STEPS
        self._add(tensor.channels.step, step)
        self._add(tensor.channels.minimum, minimum)

    def _add(self, tensor: tensor_pb2.Tensor, array: Array) -> None:
        tensor.element_type = ELEMENT_TYPES[array.dtype]
        tensor.shape.extend(array.shape)
        tensor.encoding = tensor_pb2.ENCODING_RAW
        self._arrays.append(array)


class _Decoder:
    def __init__(self, by_path: Mapping[str, Slot], source: DataSource) -> None:
        self._by_path = by_path
        self._source = source

    def read(self, cls: type, message: Message, path: str) -> Any:
        if issubclass(cls, OwnForm):
            return cls.read(message)
        fields = fields_of(type(message))  # type: ignore[arg-type]
        return cls(**{field.name: self._get(cls, message, field, path) for field in fields})

    def _get(self, cls: type, message: Message, field: Field, path: str) -> Any:
        value, kind = getattr(message, field.name), field.message
        if kind is None:
            return list(value) if field.is_repeated else value
        path = f"{path}/{field.name}"
        if kind == "Tensor":
            if message.HasField(field.name):
                return array_of(self._by_path[path], self._source)
            if field.name in _required(cls):
                raise WireError(f"part {path.partition('/')[0]!r} has no tensor {path!r}, which its kind requires")
            return None
        if kind == "NamedTensor":
            return {item.name: array_of(self._by_path[f"{path}/{item.name}"], self._source) for item in value}
        if field.is_repeated:
            (listed,) = get_args(_types_of(cls)[field.name])
            return [self.read(listed, item, path) for item in value]
        return self.read(_types_of(cls)[field.name], value, path)


def _set_scalar(message: Message, field: Field, item: Any, path: str) -> None:
    try:
        if field.is_repeated:
            getattr(message, field.name).extend(item)
        else:
            setattr(message, field.name, item)
    except (TypeError, ValueError) as error:
        raise field_error(f"{path}/{field.name}", item, error) from error


@functools.cache
def _types_of(cls: type) -> Mapping[str, Any]:
    """Returns the types of a class's fields, by name."""
    return get_type_hints(cls)


@functools.cache
def _required(cls: type) -> frozenset[str]:
    """Returns the names of a kind's required array fields."""
    return frozenset(name for name, kind in _types_of(cls).items() if kind == Array)


def _to_wire_type(array: Array, wire_type: np.dtype, path: str) -> Array:
    if array.dtype.kind == "f" and array.dtype != wire_type:
        with np.errstate(over="ignore"):
            narrow = array.astype(wire_type)
        _check_range(array, np.isfinite(narrow) | ~np.isfinite(array), wire_type.name, path)
        array = narrow
    if array.dtype not in ELEMENT_TYPES:
        raise WireError(f"{path}: elements of type {array.dtype} cannot be sent")
    return array


def _check_range(array: Array, fits: Array, name: str, path: str) -> None:
    if not fits.all():
        row = int(np.argwhere(~fits)[0][0]) if array.ndim else 0
        raise KnowledgeError(
            f"{path}, row {row}: {float(array[~fits][0]):g} does not fit {name} "
            f"(largest {LARGEST:.0f} for float16 and uint8); use float32 for this run or scale the features down"
        )
