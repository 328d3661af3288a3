"""Records what the devices of an in-memory run send and receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleetdistill.knowledge import Kind
from fleetdistill.wire.codec import decode
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class Message:
    """One answered ask of a device.

    Attributes:
        device: Id of the device.
        round: Round of the ask.
        step: Step of the ask.
        received: Parts of the ask, as decoded from the wire.
        sent: Parts of the answer, as decoded from the wire.
    """

    device: str
    round: int
    step: str
    received: Mapping[str, Kind]
    sent: Mapping[str, Kind]


@dataclass
class Record:
    """All messages of a run, in the order of the receipts."""

    messages: list[Message] = field(default_factory=list)

    def of(self, device: str) -> list[Message]:
        """Returns the messages of one device."""
        return [message for message in self.messages if message.device == device]


class RecordingLink(MemoryLink):
    """An in-memory link that adds every acknowledged answer, and the ask that it answers, to a record.

    Payloads are read from the store while the server still has them, so they are exactly what was on the wire.
    """

    def __init__(self, api: DeviceApi, store: Store, device: str, record: Record) -> None:
        super().__init__(api)
        self._store, self._device, self._record = store, device, record
        self._ask: service_pb2.Ask | None = None
        self._received: Mapping[str, Kind] = {}

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        response = super().next_ask(identity, wait_seconds)
        if response.HasField("ask"):
            self._ask = response.ask
            self._received = self._parts(response.ask.payload) if response.ask.payload else {}
        return response

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        receipt = super().upload(header, chunks)
        assert self._ask is not None
        sent = self._parts(header.payload.sha256)
        message = Message(self._device, self._ask.round, self._ask.step, self._received, sent)
        self._record.messages.append(message)
        return receipt

    def _parts(self, sha256: bytes) -> Mapping[str, Kind]:
        return decode(self._store.blobs.open(sha256))
