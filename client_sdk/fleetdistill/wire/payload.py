"""Payloads: typed parts, with the data of all tensors in one contiguous range of bytes.

The parts (a `Parts` message whose tensors have no data) are sent and stored whole. The data of all tensors follows in
field order, addressed by one byte offset that is the same on the wire, in the spool and in a blob.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import google_crc32c
import numpy as np
from google.protobuf.message import Message

from fleetdistill.errors import WireError
from fleetdistill.wire.compression import RAW, Packer, unpack
from fleetdistill.wire.v1 import knowledge_pb2, tensor_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CHUNK_BYTES", "DTYPES", "AnyChunk", "Slot", "chunk_data", "chunks", "slots"]
CHUNK_BYTES = 1 << 20
JOINED_BYTES = 64 << 10
"""Largest size of neighbouring tensors that are sent in one chunk."""
MAX_PARTS = 100
MAX_TENSORS = 10_000
MAX_AXES = 16
MAX_NAME = 256


# NumPy cannot create larger arrays, even empty ones such as [2**62, 2**62, 0].
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


class Field(NamedTuple):
    """A field of a message, looked up once per message type: reading a descriptor takes microseconds a field.

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


@dataclass(frozen=True)
class Slot:
    """Position and type of one tensor in a payload's data.

    Attributes:
        path: Path within the parts, such as `knowledge/features/cut`.
        dtype: Element type.
        shape: Sizes of the axes.
        start: Offset of the first byte of the tensor's data.
        kind: Kind of the part, such as `sample_knowledge`.
        channels: Slots of `step` and `minimum` if the tensor is quantized by channel, else None.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    kind: str = ""
    channels: tuple[Slot, Slot] | None = None

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def stop(self) -> int:
        """Offset of the first byte after the tensor's data."""
        return self.start + self.nbytes


Data: TypeAlias = bytes | memoryview
"""Bytes, or a view of bytes that need no copy."""


class Chunk(NamedTuple):
    """The fields of the message `Chunk`; accessing `data` does not copy it."""

    offset: int
    data: Data
    crc32c: int
    compression: knowledge_pb2.Compression.ValueType = RAW


AnyChunk: TypeAlias = Chunk | knowledge_pb2.Chunk


class DataSource(Protocol):
    """Source of a payload's bytes by offset: arrays in memory, a spool file or a blob.

    Sources that need no copy, such as mapped files, also have a method `view` with the arguments of `read`.
    """

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from offset `start`."""


def slots(parts: knowledge_pb2.Parts) -> tuple[Slot, ...]:
    """Returns the slots of all tensors of the parts, in field order.

    Raises:
        WireError: A tensor has an unknown type or encoding, an invalid shape, invalid `channels`, or inline data; a
            name is empty, too long or repeated; or there are more than `MAX_PARTS` parts or `MAX_TENSORS` tensors.
    """
    result: list[Slot] = []
    if len(parts.parts) > MAX_PARTS:
        raise WireError(f"the payload has {len(parts.parts)} parts, must be at most {MAX_PARTS}")
    for kind, path, tensor in _tensors(parts):
        result += _slots_of(kind, path, tensor, result[-1].stop if result else 0)
        if len(result) > MAX_TENSORS:
            raise WireError(f"the payload has more than {MAX_TENSORS} tensors")
    _check_unique([slot.path for slot in result])
    return tuple(result)


def _slots_of(kind: str, path: str, tensor: tensor_pb2.Tensor, start: int) -> list[Slot]:
    """Returns the slot of a tensor, followed by those of its channels if it is quantized."""
    slot = Slot(path, _dtype(path, tensor), _shape(path, tensor), start, kind)
    if tensor.encoding == tensor_pb2.ENCODING_RAW:
        return [slot]
    step = _channel_slot(slot, "step", tensor.channels.step, slot.stop)
    minimum = _channel_slot(slot, "minimum", tensor.channels.minimum, step.stop)
    return [replace(slot, channels=(step, minimum)), step, minimum]


def _channel_slot(of: Slot, name: str, tensor: tensor_pb2.Tensor, start: int) -> Slot:
    path = f"{of.path}/{name}"
    result = Slot(path, _dtype(path, tensor), _shape(path, tensor), start, of.kind)
    if (result.dtype, result.shape, tensor.encoding) != (_FLOAT32, of.shape[1:2], tensor_pb2.ENCODING_RAW):
        text = f"tensor {path!r} is {result.dtype.name} {list(result.shape)}"
        raise WireError(f"{text}, must be raw float32 {list(of.shape[1:2])}: one number per channel")
    return result


def tensor_paths(part: knowledge_pb2.Part) -> set[str]:
    """Returns the paths of a part's tensors within it, without those of channels; the part is one of `slots`."""
    kind = part.WhichOneof("kind")
    return {path.removeprefix("/") for path, _ in _walk(getattr(part, str(kind)), "")}


def data_bytes(parts: knowledge_pb2.Parts) -> int:
    """Returns the size of all tensors in bytes."""
    return sum(slot.nbytes for slot in slots(parts))


def checksum(data: Data) -> int:
    """Returns the CRC-32C of data."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    # The library's C code accepts arrays, but no views; its Python code accepts neither.
    viewed = np.frombuffer(data, np.uint8) if google_crc32c.implementation == "c" else bytes(data)
    return int(google_crc32c.value(viewed))


def pieces(source: DataSource, start: int, stop: int) -> Iterator[bytes]:
    """Yields the bytes `[start, stop)` in pieces of at most `CHUNK_BYTES`."""
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
    """Yields a payload's data from `first_byte` as checksummed chunks; a chunk belongs to parts of one kind.

    Args:
        source: Source of the data.
        all_slots: Slots of the payload's tensors.
        first_byte: Offset in the uncompressed data of all tensors.
        compression: Compression that the receiver supports; see `fleetdistill.wire.compression`.
    """
    for start, data, how in packed(source, all_slots, first_byte, compression):
        yield Chunk(start, data, checksum(data), how)


def packed(
    source: DataSource,
    all_slots: Sequence[Slot],
    first_byte: int,
    compression: knowledge_pb2.Compression.ValueType,
) -> Iterator[tuple[int, Data, knowledge_pb2.Compression.ValueType]]:
    """Yields offset, bytes on the link and compression of each chunk of `chunks`."""
    packer, read = Packer(compression), getattr(source, "view", source.read)
    for begin, stop in _ranges(all_slots):
        packer.next_range()
        for start in range(max(begin, first_byte), stop, CHUNK_BYTES):
            yield start, *packer.pack(read(start, min(CHUNK_BYTES, stop - start)))


def _ranges(all_slots: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of bytes that are cut into chunks: a large tensor, or small neighbours of one kind.

    A message costs more than joining small tensors, but large ones need no copy and may differ in what compresses.
    """
    start = stop = 0
    kind = ""
    for slot in all_slots:
        if stop > start and (slot.stop - start > JOINED_BYTES or slot.kind != kind):
            yield start, stop
            start = stop
        stop, kind = slot.stop, slot.kind
    if stop > start:
        yield start, stop


def slot_at(all_slots: Sequence[Slot], offset: int) -> Slot | None:
    """Returns the slot of the tensor that has a byte of the payload's data; None beyond the last one."""
    number = bisect_right(all_slots, offset, key=lambda slot: slot.stop)
    return all_slots[number] if number < len(all_slots) else None


def chunk_data(chunk: AnyChunk) -> Data:
    """Returns a chunk's data, decompressed. Raises WireError for a damaged frame or one above 1 MiB."""
    return unpack(chunk.data, chunk.compression, CHUNK_BYTES)


def elements_of(slot: Slot, source: DataSource) -> np.ndarray:
    """Reads the elements of one tensor as they are stored, `[N]`; read-only."""
    return np.frombuffer(getattr(source, "view", source.read)(slot.start, slot.nbytes), slot.dtype)


def array_of(slot: Slot, source: DataSource) -> np.ndarray:
    """Reads one tensor as a read-only array; quantized tensors are decoded."""
    elements = np.require(elements_of(slot, source).reshape(slot.shape), requirements="A")
    if slot.channels is None:
        return elements
    step, minimum = (array_of(channel, source) for channel in slot.channels)
    return dequantize(elements, step, minimum)


def _tensors(parts: knowledge_pb2.Parts) -> Iterator[tuple[str, str, tensor_pb2.Tensor]]:
    """Yields the part's kind, the path and the description of each tensor, without those of channels."""
    for part in parts.parts:
        _check_name(part.name)
        kind = part.WhichOneof("kind")
        if kind is None:
            raise WireError(f"part {part.name!r} has a kind that this version does not know")
        for path, tensor in _walk(getattr(part, kind), part.name):
            yield kind, path, tensor


def _walk(message: Message, path: str) -> Iterator[tuple[str, tensor_pb2.Tensor]]:
    if isinstance(message, tensor_pb2.Tensor):
        yield path, message
        return
    if not has_tensors(type(message)):  # type: ignore[arg-type]
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
        raise WireError(f"tensor {path!r} has its data in the header; send data in chunks")
    if tensor.encoding not in (tensor_pb2.ENCODING_RAW, tensor_pb2.ENCODING_CHANNEL_STEPS):
        raise WireError(f"tensor {path!r} has encoding {tensor.encoding}, must be raw or channel steps")
    dtype = DTYPES.get(tensor.element_type)
    if dtype is None:
        raise WireError(f"tensor {path!r} has unknown element type {tensor.element_type}")
    quantized = tensor.encoding == tensor_pb2.ENCODING_CHANNEL_STEPS
    if quantized != tensor.HasField("channels"):
        raise WireError(f"tensor {path!r} must {'' if quantized else 'not '}have steps and minima of its channels")
    if quantized and (dtype != np.uint8 or len(tensor.shape) < 2):
        text = f"tensor {path!r} is {dtype.name} {list(tensor.shape)[: MAX_AXES + 1]}"
        raise WireError(f"{text}; channel steps must be uint8 with at least two axes")
    return dtype


def _shape(path: str, tensor: tensor_pb2.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) > MAX_AXES or any(size < 0 for size in shape):
        raise WireError(
            f"tensor {path!r} has shape {list(shape)[: MAX_AXES + 1]}, axes must be >= 0, at most {MAX_AXES}"
        )
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise WireError(f"tensor {path!r} has shape {list(shape)}, must have at most {MAX_ELEMENTS} elements")
    return shape


# --- Quantization of feature columns to uint8, with a separate scale for each channel.
#
# A channel is a position on axis 1: feature maps [N, D, H, W] and rows of features [N, D] have D channels. Element e of
# channel d represents `minimum[d] + e * step[d]`, computed in float32.

LARGEST = float(np.finfo(np.float16).max)
"""Largest absolute value that can be encoded; equal to float16's, so that both types accept the same values."""
MAX_SCALE = float(np.float32(2 * LARGEST / 255))
_LEVELS = np.float32(255)


# Smaller spans are treated as 0, because the division would leave float32's normal range.
_MIN_SPAN = np.float32(2.0**-110)


def quantize(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Encodes finite float32 numbers of absolute value at most `LARGEST`.

    A channel with equal numbers has step 0; a channel without numbers has step 0 and minimum 0. In other channels the
    error is at most half the channel's step, plus float32 rounding.

    Args:
        numbers: Array `[N, D, ...]`, float32.

    Returns:
        `(elements, step, minimum)`: uint8 in the shape of `numbers`, and twice `[D]` float32.
    """
    across = tuple(axis for axis in range(numbers.ndim) if axis != 1)
    if not numbers.size:
        none = np.zeros(numbers.shape[1], np.float32)
        return np.zeros(numbers.shape, np.uint8), none, none
    minimum = numbers.min(axis=across)
    span = numbers.max(axis=across) - minimum
    step = np.where(span < _MIN_SPAN, np.float32(0), span / _LEVELS)
    shape = (1, -1, *[1] * (numbers.ndim - 2))
    divisor = np.where(step > 0, step, np.float32(1)).reshape(shape)
    elements = np.rint((numbers - minimum.reshape(shape)) / divisor)
    return np.minimum(elements, _LEVELS).astype(np.uint8), step, minimum


def dequantize(elements: NDArray[Any], step: NDArray[Any], minimum: NDArray[Any]) -> NDArray[Any]:
    """Decodes the result of `quantize` to read-only float32 in the shape of `elements`."""
    shape = (1, -1, *[1] * (elements.ndim - 2))
    result: NDArray[Any] = elements * step.reshape(shape)
    result += minimum.reshape(shape)
    result.flags.writeable = False
    return result
