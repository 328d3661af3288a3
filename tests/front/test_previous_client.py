"""A device of the previous release against today's front, and today's SDK against a server that says more.

The previous client speaks from recorded descriptors (`support.previous_client`); the front is the real process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_front import RUN, LiveFront, live_front, open_round, prepare_store, refused, write_asks
from support.previous_client import PreviousClient
from support.small_device import SmallWorker
from support.wire_samples import data_of, make_contract, make_payload

from fleetdistill import COLUMNS, Device, Step
from fleetdistill.testing import EventLog
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2, tensor_pb2
from fleetdistill_server.store.store import Store

_numbers = itertools.count(1)


@pytest.fixture
def previous(front: LiveFront) -> Iterator[PreviousClient]:
    """A device of 0.1.0, checked in."""
    client = PreviousClient(front.port, RUN, f"previous-{next(_numbers)}")
    client.check_in()
    yield client
    client.channel.close()


def ask(store: Store, client: PreviousClient, **changes: Any) -> Any:
    """Opens a round, asks the device, and lets it fetch the ask."""
    number = open_round(store, client.identity.device)
    write_asks(store, number, client.identity.device, **changes)
    found = client.next_ask().ask
    assert (found.round, found.step, found.seed) == (number, "train", 7)
    return found


# --- the previous release's device, today's server


def test_it_is_told_the_contract_and_admitted(front: LiveFront, store: Store) -> None:
    client = PreviousClient(front.port, RUN, "newcomer-of-0.1")
    taken = client.check_in()
    assert (client.contract.run, client.contract.method, list(client.contract.classes)) == (
        RUN,
        "feddkc",
        ["0", "1", "2"],
    )
    assert len(client.identity.secret) == 32
    assert 0 < taken.heartbeat_seconds < taken.lease_seconds
    assert client.check_in().secret == b"", "again, with its secret"
    assert "newcomer-of-0.1" in store.devices.present(RUN)
    client.channel.close()


def test_its_whole_turn_works(previous: PreviousClient, store: Store) -> None:
    payload = make_payload(rows=60_000)
    given = ask(store, previous, payload=payload)
    assert (given.payload, given.payload_bytes) == (payload.sha256, payload.data_bytes)
    header, data = previous.download(payload.sha256)
    assert data == data_of(payload)
    assert header.data_bytes == payload.data_bytes
    assert previous.heartbeat().ask_open
    parts, answer = previous.knowledge(rows=5)
    receipt = previous.upload(given, parts, answer, samples=3)
    (row,) = [row for row in store.asks.uploads(RUN) if row["device"] == previous.identity.device]
    assert (row["receipt"], row["samples"], row["attempt"]) == (receipt.id, 3, 1)
    assert data_of(store.blobs.open(row["sha256"])) == answer
    assert previous.status(given).receipt == receipt
    assert previous.upload(given, parts, answer) == receipt, "the same upload again gets the same receipt"
    assert previous.next_ask().WhichOneof("next") == "come_back"


def test_it_resumes_an_upload_and_a_download(previous: PreviousClient, store: Store) -> None:
    payload = make_payload(rows=60_000)
    given = ask(store, previous, payload=payload)
    assert previous.download(payload.sha256, first_byte=1_500_000)[1] == data_of(payload)[1_500_000:]
    parts, answer = previous.knowledge(rows=60_000)
    with refused() as found:
        previous.upload(given, parts, answer, stop_after=2)
    assert found[0].reason == "incomplete"
    assert 0 < previous.status(given).next_byte < len(answer)
    previous.upload(given, parts, answer)
    (row,) = [row for row in store.asks.uploads(RUN) if row["device"] == previous.identity.device]
    assert data_of(store.blobs.open(row["sha256"])) == answer


def test_it_declines_and_leaves(previous: PreviousClient, store: Store) -> None:
    given = ask(store, previous)
    previous.decline(given, "no teacher")
    row = store.asks.get(RUN, given.round, 1, previous.identity.device)
    assert row is not None
    assert (row["status"], row["reason"]) == ("out", "declined")
    assert not previous.heartbeat().ask_open
    previous.leave()
    assert previous.identity.device not in store.devices.present(RUN)


def test_it_waits_for_a_stopped_run(previous: PreviousClient, store: Store) -> None:
    """It cannot read the reason, and comes back when it is told to."""
    store.runs.end(RUN, "stopped", "the engine failed 6 times")
    try:
        found = previous.next_ask()
    finally:
        store.runs.end(RUN, "running", "")
    assert found.WhichOneof("next") == "come_back"
    assert 0 < found.come_back.after_seconds < found.come_back.before_seconds


def test_it_is_told_what_it_cannot_understand_more_of(previous: PreviousClient, store: Store) -> None:
    """New codes and fields reach it as a final refusal with a sentence, and as `ask_open` false."""
    given = ask(store, previous)
    parts, answer = previous.knowledge()
    store.asks.expire(RUN, 1e12)
    assert not previous.status(given).ask_open
    with refused() as found:
        previous.upload(given, parts, answer)
    assert (found[0].reason, found[0].status.name) == ("late", "FAILED_PRECONDITION")
    assert "no longer accepts answers (deadline passed)" in found[0].text


def test_a_run_in_uint8_refuses_it_with_a_sentence(tmp_path: Path) -> None:
    store = prepare_store(tmp_path, knowledge_type=tensor_pb2.ELEMENT_TYPE_UINT8)
    with live_front(tmp_path) as front:
        client = PreviousClient(front.port, RUN, "old")
        with refused() as found:
            client.check_in()
        assert found[0].reason == "contract-mismatch"
        assert "uint8" in found[0].text.lower()
        assert store.devices.get(RUN, "old") is None
        client.channel.close()
    store.close()


def test_a_front_that_packs_sends_it_plain_chunks(tmp_path: Path) -> None:
    """It offers no compression, so it gets none, whatever the server would like to do."""
    store = prepare_store(tmp_path)
    with live_front(tmp_path) as front:
        client = PreviousClient(front.port, RUN, "old")
        client.check_in()
        payload = make_payload(rows=60_000)  # shrinks well
        ask(store, client, payload=payload)
        assert client.download(payload.sha256)[1] == data_of(payload)
        client.channel.close()
    store.close()


# --- today's SDK, a newer server


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
        messages = (knowledge_pb2.TensorChunk(**chunk._replace(data=bytes(chunk.data))._asdict()) for chunk in chunks)
        return newer(self.payload.header()), map(newer, messages)

    def heartbeat(self, identity: Any) -> None: ...

    def leave(self, identity: Any) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def test_fields_of_the_future_are_no_obstacle_to_the_sdk(tmp_path: Path) -> None:
    events, server = EventLog(), NewerServer()
    with Device(
        server=server,  # type: ignore[arg-type]
        worker=SmallWorker,  # type: ignore[arg-type]
        state_dir=tmp_path,
        device_id="d1",
        allow=COLUMNS,
        export_onnx="never",
        on_event=events.append,
    ) as device:
        assert device.step(0) is Step.ANSWERED
        assert device.step(0) is Step.FINISHED
    assert events.kinds() == ["checked-in", "ask", "answered", "delivered", "finished"]
    assert sum(map(len, server.chunks)) == make_payload().data_bytes
