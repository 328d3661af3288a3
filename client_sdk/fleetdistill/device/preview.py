"""What an answer of a device contains, for the app's user: parts, tensors, sizes and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from fleetdistill.knowledge import Parts
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Answer
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.payload import Slot, array_of
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

_BINS = 8
_BARS = " ▁▂▃▄▅▆▇█"
_NAMES = {"labels": "classes"}
"""Fields of messages that a preview names otherwise: those of statistics are the classes that a device has."""


@dataclass(frozen=True)
class Histogram:
    """Distribution of the values of a tensor.

    Attributes:
        counts: Number of values in each bin.
        edges: Edges of the bins, one more than bins.
    """

    counts: Sequence[int]
    edges: Sequence[float]

    def __str__(self) -> str:
        """Returns the range and a bar for each bin."""
        most = max(self.counts, default=0) or 1
        bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in self.counts)
        return f"{self.edges[0]:.3g} [{bars}] {self.edges[-1]:.3g}" if self.edges else "empty"


@dataclass(frozen=True)
class PreviewTensor:
    """One tensor of an answer.

    Attributes:
        name: Path of the tensor, such as `knowledge/features/cut`.
        dtype: Element type on the wire, such as `float16`.
        shape: Sizes of its axes.
        bytes: Size of its data, uncompressed.
        histogram: Distribution of its values as the server would decode them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    histogram: Histogram


@dataclass(frozen=True)
class PreviewPart:
    """One part of an answer.

    Attributes:
        name: Name of the part.
        kind: Kind of the part, such as `sample_knowledge`.
        columns: Columns that it contains, all of them in `Device.allow`.
        tensors: Its tensors.
        values: All other fields of the part that would be sent, such as `metrics`, or the `classes` of statistics.
    """

    name: str
    kind: str
    columns: Sequence[str]
    tensors: Sequence[PreviewTensor]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Preview:
    """What an answer of a device contains, from `Device.preview`. `print(preview)` shows it as a table.

    Attributes:
        run: Name of the run.
        method: Method of the run.
        step: Name of the step that was computed.
        samples: Number of samples that the answer declares.
        bytes: Size of the answer, uncompressed.
        private: Whether the values contain the noise of a private run.
        summed: Whether the values leave the device under a mask, so that the server gets only a sum over devices.
        parts: Parts of the answer.
    """

    run: str
    method: str
    step: str
    samples: int
    bytes: int
    private: bool
    summed: bool
    parts: Sequence[PreviewPart]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that the answer contains, sorted."""
        return tuple(sorted({column for part in self.parts for column in part.columns}))

    def __str__(self) -> str:
        """Returns a table with a line for each part and tensor."""
        noise = ", with the noise of a private run" if self.private else ""
        noise += ", of which the server gets only the sum over devices" if self.summed else ""
        lines = [
            f"run {self.run!r}, {self.method}, step {self.step!r}: {self.bytes} bytes, {self.samples} samples{noise}"
        ]
        for part in self.parts:
            lines.append(f"{part.name} ({part.kind}): {', '.join(part.columns) or 'no column'}")
            lines += [
                f"  {tensor.name}  {tensor.dtype} {list(tensor.shape)}  {tensor.bytes} bytes  {tensor.histogram}"
                for tensor in part.tensors
            ]
            lines += [f"  {line}" for name, value in part.values.items() for line in _lines(name, value)]
        return "\n".join(lines)


def preview_of(contract: contract_pb2.Contract, step: str, answer: Answer, payload: Payload) -> Preview:
    """Returns the preview of an encoded answer."""
    config = config_of_contract(contract)
    tensors = {slot.path: _tensor(slot, payload) for slot in payload.slots}
    return Preview(
        run=contract.run,
        method=contract.method,
        step=step,
        samples=answer.samples,
        bytes=payload.header().ByteSize() + payload.data_bytes,
        private=config.guarantee is not None,
        summed=config.sums_securely,
        parts=[_part(part, answer.parts, tensors) for part in payload.parts.parts],
    )


def _part(part: knowledge_pb2.Part, parts: Parts, tensors: Mapping[str, PreviewTensor]) -> PreviewPart:
    kind = part.WhichOneof("kind") or ""
    values = _without_tensors(_fields(getattr(part, kind)))
    return PreviewPart(
        name=part.name,
        kind=kind,
        columns=tuple(parts[part.name].columns()),
        tensors=[one for path, one in tensors.items() if path.startswith(f"{part.name}/")],
        values=values if isinstance(values, dict) else {},
    )


def _lines(name: str, value: Any) -> list[str]:
    """Returns a field as text: a line for each of several records."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [line for item in value for line in _lines(name, item)]
    if isinstance(value, dict):
        value = ", ".join(
            f"{key} {one:.6g}" if isinstance(one, float) else f"{key} {one}" for key, one in value.items()
        )
    return [f"{name}: {value}"]


def _fields(message: Message) -> dict[str, Any]:
    """Returns the set fields of a message and all its numbers; enumerations as names, bytes as hexadecimal."""
    result = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_set = message.HasField(field.name) if field.has_presence else bool(value)
        is_number = not field.has_presence and isinstance(value, int | float) and not isinstance(value, bool)
        if is_set or (is_number and field.enum_type is None):
            result[_NAMES.get(field.name, field.name)] = _plain(value, field)
    return result


def _plain(value: Any, field: Any) -> Any:
    if isinstance(value, Message):
        return _fields(value)
    if isinstance(value, Mapping):
        return {key: _plain(one, field.message_type.fields_by_name["value"]) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, field) for item in value]
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name if value in field.enum_type.values_by_number else value
    return value.hex() if isinstance(value, bytes) else value


def _without_tensors(value: Any) -> Any:
    """Returns a message as a dict without its tensors; None for a tensor, or for what contains only tensors."""
    if isinstance(value, list):
        return [result for item in value if (result := _without_tensors(item)) is not None] or None
    if not isinstance(value, dict):
        return value
    if "element_type" in value or "tensor" in value:
        return None
    return {name: result for name, one in value.items() if (result := _without_tensors(one)) is not None} or None


def _tensor(slot: Slot, payload: Payload) -> PreviewTensor:
    values = array_of(slot, payload.source)
    return PreviewTensor(slot.path, slot.dtype.name, slot.shape, slot.nbytes, _histogram(values))


def _histogram(values: np.ndarray) -> Histogram:
    if not values.size:
        return Histogram((), ())
    counts, edges = np.histogram(values.astype(np.float64), bins=_BINS)
    return Histogram(tuple(counts.tolist()), tuple(edges.tolist()))
