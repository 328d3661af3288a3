"""What attacks work on: recorded messages of an in-memory run, rows to score, and what the attacker knows besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetdistill.knowledge import ClassSums, HeadGradient, Kind, LinearHead, Parts, SecureMessage
from fleetdistill.link.base import Link
from fleetdistill.methods.base import DeviceMethod
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats_secure.encoding import gradient_of_sum
from fleetdistill.secure.primitives import from_bytes, lift, reduce
from fleetdistill.wire.codec import decode
from fleetdistill.wire.digests import identity
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.store.store import Store

T = TypeVar("T")
Part = tuple[str, str]
"""Name of a part, and of the attack on it."""
Scores = NDArray[np.float64]
"""`[n]`, one for each candidate; higher if the row looks like one that the device trained on."""


@dataclass(frozen=True)
class Message:
    """One answered ask of a device.

    Attributes:
        device: Id of the device.
        round: Round of the ask, from 1.
        step: Step of the ask.
        seed: Seed of the ask, from which the device draws its batches.
        received: Parts of the ask, as decoded from the wire.
        sent: Parts of the answer, as decoded from the wire.
    """

    device: str
    round: int
    step: str
    seed: int
    received: Parts
    sent: Parts


@dataclass(frozen=True, eq=False)
class DeviceSum:
    """A secure sum of devices' class statistics, which is all that the server has of any of them.

    Attributes:
        devices: Ids of the devices in the sum.
        part: Counts, sums and second moment of all their rows; `mu` is that of the sum's noise, 0 without noise.
        gradients: Heads, and the sums of the devices' gradients at them.
    """

    devices: tuple[str, ...]
    part: ClassSums
    gradients: tuple[tuple[LinearHead, HeadGradient], ...] = ()

    def as_messages(self) -> list[Message]:
        """Returns the sums as messages of all their devices together, for attacks on messages."""
        name = f"sum of {len(self.devices)} devices"
        summed = Message(device=name, round=0, step="sum", seed=0, received={}, sent={name: self.part})
        return [
            summed,
            *(
                Message(device=name, round=0, step=REFINE, seed=0, received={"head": head}, sent={name: gradient})
                for head, gradient in self.gradients
            ),
        ]


def sums_of(state: Mapping[str, Any]) -> list[DeviceSum]:
    """Returns the secure sums in the state of a `SumServer`: its parts, and the devices in each of them."""
    members: dict[str, list[str]] = {}
    for device, name in sorted(state["members"].items()):
        members.setdefault(name, []).append(device)
    result = []
    for name, (part, _) in state["parts"].items():  # devices of a forgotten sum may be members of none
        arrays = {item: part[item].numpy() for item in ("counts", "sums", "second_moment")}
        result.append(DeviceSum(tuple(members[name]), ClassSums(**arrays, mu=part["mu"], discrete=part["discrete"])))
    return result


def gradients_of(
    devices: Sequence[str], record: Record, method: ServerMethod
) -> Iterator[tuple[LinearHead, HeadGradient]]:
    """Yields the heads at which all devices of a sum have sent their masked gradients, and the sums of these."""
    masked = [[message for message in record.of(device) if message.step == REFINE] for device in devices]
    parameters = method.config.parameters_for(len(devices), method.context.classes, method.sizes().features)
    for messages in zip(*masked, strict=False):
        parts = [part for message in messages for part in message.sent.values() if isinstance(part, SecureMessage)]
        numbers = [from_bytes(part.gradient.tobytes(), parameters.width) for part in parts if part.gradient is not None]
        head = messages[0].received["head"]
        assert isinstance(head, LinearHead)
        total = reduce(np.sum(numbers, axis=0, dtype=np.uint64), parameters.width)
        yield head, gradient_of_sum(lift(total, parameters.width), parameters)


@dataclass
class Record:
    """All messages of a run, in the order of the receipts."""

    messages: list[Message] = field(default_factory=list)
    _payloads: dict[bytes, Parts] = field(default_factory=dict)

    def of(self, device: str) -> list[Message]:
        """Returns the messages of one device."""
        return [message for message in self.messages if message.device == device]

    def link(self, api: DeviceApi, device: str) -> Link:
        """Returns an in-memory link that records the device's messages; see `run_over_memory`."""
        return _RecordingLink(api, device, self)

    def parts(self, store: Store, sha256: bytes) -> Parts:
        """Returns the parts of a payload that the store still has, copied to memory; equal payloads are kept once."""
        if sha256 not in self._payloads:
            decoded = decode(store.blobs.open(sha256))
            self._payloads[sha256] = {name: _in_memory(part) for name, part in decoded.items()}
        return self._payloads[sha256]


class _RecordingLink(MemoryLink):
    """An in-memory link that adds every acknowledged answer, and the ask that it answers, to a record.

    Payloads are read from the store while the server still has them, so they are exactly what was on the wire.
    """

    def __init__(self, api: DeviceApi, device: str, record: Record) -> None:
        super().__init__(api)
        self._store, self._device, self._record = api.store, device, record
        self._ask: service_pb2.Ask | None = None
        self._received: Parts = {}

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        response = super().next_ask(identity, wait_seconds)
        if response.HasField("ask"):
            self._ask = response.ask
            payload = response.ask.payload
            self._received = self._record.parts(self._store, payload) if payload else {}
        return response

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        receipt = super().upload(header, chunks)
        assert self._ask is not None
        sent = self._record.parts(self._store, identity(header.payload))
        message = Message(self._device, self._ask.round, self._ask.step, self._ask.seed, self._received, sent)
        self._record.messages.append(message)
        return receipt


def _in_memory(value: Any) -> Any:
    """Copies a part's arrays, which are mapped from files that the server deletes."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, Kind):
        copied = {field.name: _in_memory(getattr(value, field.name)) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        return dataclasses.replace(value, **copied)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return {name: _in_memory(one) for name, one in value.items()}
    return value


@dataclass(frozen=True)
class Rows:
    """Labelled rows.

    Attributes:
        inputs: `[n, *input_shape]` float32.
        labels: `[n]` int64.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Attacker:
    """What the server knows besides the messages.

    Attributes:
        method: A new server half of the run: architectures and initial weights.
        public: Labelled rows of the same kind as the devices', of which no device has any.
        device: The method's device half, with which the server can train a model of its own.
    """

    method: ServerMethod
    public: Rows
    device: type[DeviceMethod] | None = None
    _results: dict[tuple[str, int, int], tuple[Any, object, Rows]] = field(default_factory=dict)

    def once(self, name: str, part: object, rows: Rows, compute: Callable[[], T]) -> T:
        """Returns the result of `compute` for a part and rows, computed once: many devices receive the same part."""
        key = (name, id(part), id(rows))
        if key not in self._results:
            self._results[key] = (compute(), part, rows)  # the references keep the ids valid
        result: T = self._results[key][0]
        return result
