"""The SDK with a server of a later version, whose messages have fields that the SDK does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.live_front import RUN
from support.open_device import open_device
from support.small_device import SmallWorker
from support.wire_samples import make_contract, make_payload

from fleetdistill import COLUMNS, Step
from fleetdistill.testing import EventLog
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

UNKNOWN = bytes([0x9A, 0x7D, 3]) + b"new"  # field 2003, length-delimited


def newer(message: Any) -> Any:
    """A message as a newer server sends it: with a field that nobody here knows."""
    return type(message).FromString(message.SerializeToString() + UNKNOWN)


class NewerServer:
    """A link whose every answer has a field of the future; it asks once."""

    remote = True

    def __init__(self) -> None:
        self.ask = service_pb2.Ask(round=1, step_number=1, step="train", seed=7, deadline_seconds=60)
        self.payload = make_payload(6)
        self.ask.payload, self.ask.payload_bytes = self.payload.sha256, self.payload.data_bytes
        self.receipts: list[Any] = []
        self.chunks: list[bytes] = []

    def check_in(self, identity: Any, profile: Any) -> Any:
        contract = newer(make_contract(run=RUN))
        return newer(service_pb2.CheckInResponse(contract=contract, lease_seconds=60, heartbeat_seconds=15))

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        if self.receipts:
            return newer(service_pb2.NextAskResponse(finished="finished: over"))
        return newer(service_pb2.NextAskResponse(ask=newer(self.ask)))

    def upload_status(self, identity: Any, name: Any) -> Any:
        return newer(service_pb2.UploadStatusResponse(ask_open=True))

    def upload(self, header: Any, chunks: Any, **_: Any) -> Any:
        self.chunks = [chunk.data for chunk in chunks]
        size = header.payload.data_bytes
        receipt = service_pb2.Receipt(id="r1", name=header.name, sha256=header.payload.sha256, data_bytes=size)
        self.receipts.append(receipt)
        return newer(receipt)

    def download(self, identity: Any, sha256: bytes, first_byte: int, **_: Any) -> Any:
        from fleetdistill.wire import payload as wire

        chunks = wire.chunks(self.payload.source, self.payload.slots, first_byte)
        messages = (knowledge_pb2.Chunk(**chunk._replace(data=bytes(chunk.data))._asdict()) for chunk in chunks)
        return newer(self.payload.header()), map(newer, messages)

    def heartbeat(self, identity: Any) -> None: ...

    def leave(self, identity: Any, *, forget: bool = False) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def test_fields_of_the_future_are_no_obstacle_to_the_sdk(tmp_path: Path) -> None:
    events, server = EventLog(), NewerServer()
    with open_device(
        server=server,
        worker=SmallWorker,
        state_dir=tmp_path,
        device_id="d1",
        allow=COLUMNS,
        export="never",
        on_event=events.append,
    ) as device:
        assert device.step(0) is Step.ANSWERED
        assert device.step(0) is Step.FINISHED
    assert events.kinds() == ["checked-in", "ask", "answered", "delivered", "finished"]
    assert sum(map(len, server.chunks)) == make_payload().data_bytes
