"""A payload: typed parts whose tensors stand apart as one run of bytes.

The parts (a `Parts` message, tensors described but without data) travel and are stored whole; the data of all tensors
follow each other in field order and are addressed by one byte offset, the same on the wire, in the spool and in a blob.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import google_crc32c
import numpy as np
from google.protobuf.message import Message

from fleetdistill.errors import WireError
from fleetdistill.wire.compression import RAW, Packer, unpacked
from fleetdistill.wire.quantize import dequantize
from fleetdistill.wire.v1 import knowledge_pb2, tensor_pb2

CHUNK_BYTES = 1 << 20
MAX_PARTS = 100
MAX_TENSORS = 10_000
MAX_AXES = 16
MAX_NAME = 256
# No array of more elements can be made, not even an empty one such as [2**62, 2**62, 0].
MAX_ELEMENTS = 1 << 56

DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.ELEMENT_TYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.ELEMENT_TYPE_BOOL: np.dtype("?"),
    tensor_pb2.ELEMENT_TYPE_INT8: np.dtype("i1"),
}
_FLOAT32 = DTYPES[tensor_pb2.ELEMENT_TYPE_FLOAT32]
ELEMENT_TYPES: dict[np.dtype[Any], Any] = {dtype: element_type for element_type, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """Where one tensor stands, and how its bytes are read.

    Attributes:
        path: Its place within the parts, such as `knowledge/features/cut`.
        dtype: Type of one element.
        shape: Sizes of the axes.
        start: First byte of its data.
        kind: Kind of the part that it belongs to, such as `sample_knowledge`.
        channels: Slots of `step` and `minimum` where elements are steps on the scale of their channel, else None.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    kind: str = ""
    channels: tuple[Slot, Slot] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """First byte after the tensor's data."""
        return self.start + self.nbytes


class Chunk(NamedTuple):
    """A `TensorChunk` that is about to be sent, field by field; reading its data does not copy them."""

    tensor: int
    offset: int
    data: bytes
    crc32c: int
    compression: knowledge_pb2.Compression.ValueType = RAW


AnyChunk: TypeAlias = Chunk | knowledge_pb2.TensorChunk


class DataSource(Protocol):
    """Anything that gives a payload's bytes by offset: arrays in memory, a spool file, a blob.

    One that can do so without a copy, such as a mapped file, has `view` too, with `read`'s arguments.
    """

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on."""


def slots(parts: knowledge_pb2.Parts) -> tuple[Slot, ...]:
    """Finds every tensor of the parts in field order.

    Raises:
        WireError: A tensor has an unknown type or encoding, a negative axis, too many or too long axes, no fitting
            `channels`, or carries data inline; a name is empty, too long or doubled; there are more than `MAX_PARTS` or
            `MAX_TENSORS`.
    """
    found: list[Slot] = []
    if len(parts.parts) > MAX_PARTS:
        raise WireError(f"the payload has {len(parts.parts)} parts, must be at most {MAX_PARTS}")
    for kind, path, tensor in _tensors(parts):
        found += _slots_of(kind, path, tensor, found[-1].stop if found else 0)
        if len(found) > MAX_TENSORS:
            raise WireError(f"the payload has more than {MAX_TENSORS} tensors")
    _check_unique([slot.path for slot in found])
    return tuple(found)


def _slots_of(kind: str, path: str, tensor: tensor_pb2.Tensor, start: int) -> list[Slot]:
    """The tensor's slot, and behind it those of its channels where it has them."""
    slot = Slot(path, _dtype(path, tensor), _shape(path, tensor), start, kind)
    if tensor.encoding == tensor_pb2.ENCODING_RAW:
        return [slot]
    step = _channel_slot(slot, "step", tensor.channels.step, slot.stop)
    minimum = _channel_slot(slot, "minimum", tensor.channels.minimum, step.stop)
    return [replace(slot, channels=(step, minimum)), step, minimum]


def _channel_slot(of: Slot, name: str, tensor: tensor_pb2.Tensor, start: int) -> Slot:
    path = f"{of.path}/{name}"
    found = Slot(path, _dtype(path, tensor), _shape(path, tensor), start, of.kind)
    if (found.dtype, found.shape, tensor.encoding) != (_FLOAT32, of.shape[1:2], tensor_pb2.ENCODING_RAW):
        text = f"tensor {path!r} is {found.dtype.name} {list(found.shape)}"
        raise WireError(f"{text}, must be raw float32 {list(of.shape[1:2])}: one number for each channel")
    return found


def data_bytes(parts: knowledge_pb2.Parts) -> int:
    """Sum of the sizes of all tensors."""
    return sum(slot.nbytes for slot in slots(parts))


def digest(parts: knowledge_pb2.Parts, data: Iterator[bytes]) -> bytes:
    """SHA-256 of the parts and the data; what names a payload everywhere."""
    running = hashlib.sha256(parts.SerializeToString(deterministic=True))
    for piece in data:
        running.update(piece)
    return running.digest()


def pieces(source: DataSource, start: int, stop: int) -> Iterator[bytes]:
    """Reads `[start, stop)` in pieces of at most `CHUNK_BYTES`."""
    while start < stop:
        size = min(CHUNK_BYTES, stop - start)
        yield source.read(start, size)
        start += size


def chunks(
    source: DataSource,
    all_slots: Sequence[Slot],
    first_byte: int = 0,
    compression: knowledge_pb2.Compression.ValueType = RAW,
) -> Iterator[Chunk]:
    """Cuts a payload's data, from `first_byte` on, into checksummed chunks that never span two tensors.

    Args:
        source: Gives the data.
        all_slots: Where its tensors stand.
        first_byte: Counted over all tensors, before packing.
        compression: What the receiver takes; see `fleetdistill.wire.compression`.
    """
    packer = Packer(compression)
    for number, slot in enumerate(all_slots):
        packer.next_tensor()
        for start in range(max(slot.start, first_byte), slot.stop, CHUNK_BYTES):
            data, packed = packer.pack(source.read(start, min(CHUNK_BYTES, slot.stop - start)))
            yield Chunk(number, start - slot.start, data, google_crc32c.value(data), packed)


def chunk_data(chunk: AnyChunk) -> bytes:
    """The tensor's bytes in a chunk, unpacked. Raises WireError for a frame that is damaged or holds over 1 MiB."""
    return unpacked(chunk.data, chunk.compression, CHUNK_BYTES)


def array_of(slot: Slot, source: DataSource) -> np.ndarray:
    """Reads one tensor whole, as a read-only array: the numbers, where its elements stand for some."""
    data = getattr(source, "view", source.read)(slot.start, slot.nbytes)
    elements = np.require(np.frombuffer(data, slot.dtype).reshape(slot.shape), requirements="A")
    if slot.channels is None:
        return elements
    step, minimum = (array_of(one, source) for one in slot.channels)
    return dequantize(elements, step, minimum)


def _tensors(parts: knowledge_pb2.Parts) -> Iterator[tuple[str, str, tensor_pb2.Tensor]]:
    """Kind of the part, path and description of every tensor, but for those of channels."""
    for part in parts.parts:
        _check_name(part.name)
        kind = part.WhichOneof("kind")
        if kind is None:
            raise WireError(f"part {part.name!r} has no kind that this version knows")
        for path, tensor in _walk(getattr(part, kind), part.name):
            yield kind, path, tensor


def _walk(message: Message, path: str) -> Iterator[tuple[str, tensor_pb2.Tensor]]:
    if isinstance(message, tensor_pb2.Tensor):
        yield path, message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for item in value if field.is_repeated else [value]:
            if isinstance(item, tensor_pb2.NamedTensor):
                _check_name(item.name)
                yield f"{path}/{field.name}/{item.name}", item.tensor
            else:
                yield from _walk(item, f"{path}/{field.name}")


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME:
        raise WireError(f"a name is {len(name)} characters long, must be 1 to {MAX_NAME}: {name[:40]!r}")


def _check_unique(paths: list[str]) -> None:
    if len(set(paths)) != len(paths):
        doubled = next(path for path, count in Counter(paths).items() if count > 1)
        raise WireError(f"tensor {doubled!r} appears twice")


def _dtype(path: str, tensor: tensor_pb2.Tensor) -> np.dtype:
    if tensor.data:
        raise WireError(f"tensor {path!r} carries its data in the header; data come in chunks")
    if tensor.encoding not in (tensor_pb2.ENCODING_RAW, tensor_pb2.ENCODING_CHANNEL_STEPS):
        raise WireError(f"tensor {path!r} has encoding {tensor.encoding}, this version knows raw and channel steps")
    dtype = DTYPES.get(tensor.element_type)
    if dtype is None:
        raise WireError(f"tensor {path!r} has unknown element type {tensor.element_type}")
    quantized = tensor.encoding == tensor_pb2.ENCODING_CHANNEL_STEPS
    if quantized != tensor.HasField("channels"):
        raise WireError(f"tensor {path!r} has {'no' if quantized else 'needless'} steps and minima of its channels")
    if quantized and (dtype != np.uint8 or len(tensor.shape) < 2):
        text = f"tensor {path!r} is {dtype.name} {list(tensor.shape)[: MAX_AXES + 1]}"
        raise WireError(f"{text}, channel steps are uint8 with at least two axes")
    return dtype


def _shape(path: str, tensor: tensor_pb2.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) > MAX_AXES or any(size < 0 for size in shape):
        raise WireError(
            f"tensor {path!r} has shape {list(shape)[: MAX_AXES + 1]}, axes must be >= 0, at most {MAX_AXES}"
        )
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise WireError(f"tensor {path!r} has shape {list(shape)}, which no machine can hold")
    return shape
