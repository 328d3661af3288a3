"""What a device may fetch, and where a download goes on."""

from __future__ import annotations

import time

import numpy as np
import pytest
from intake.device_api_fleet import RUN, Fleet
from support.wire_samples import (
    EXPECTS,
    data_of,
    make_identity,
    make_payload,
)

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.knowledge import NetworkFile
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store


def fetch(fleet: Fleet, identity: service_pb2.Identity, sha256: bytes, first_byte: int = 0) -> tuple[Payload, bytes]:
    request = service_pb2.DownloadRequest(identity=identity, sha256=sha256, first_byte=first_byte)
    chunks = fleet.api.downloads.open(request)
    payload = chunks.payload
    return payload, b"".join(chunk.data for chunk in chunks)


def test_a_payload_is_given_only_to_those_it_is_meant_for(fleet: Fleet) -> None:
    asked, other = fleet.join("d1"), fleet.join("d2")
    payload = make_payload()
    fleet.ask("d1", payload=payload)
    result, data = fetch(fleet, asked, payload.sha256)
    assert (result.header(), data) == (payload.header(), data_of(payload))
    with pytest.raises(RefusedError) as error:
        fetch(fleet, other, payload.sha256)
    assert (error.value.code, str(error.value)) == (
        Code.NOT_FOUND,
        f"device d2: neither its asks nor the contract refer to payload {payload.sha256.hex()}",
    )


def test_one_device_s_answer_is_not_another_s_to_fetch(fleet: Fleet) -> None:
    fleet.ask("d1", "d2")
    first, second = fleet.join("d1"), fleet.join("d2")
    receipt = fleet.send(first, make_payload())
    for identity in (first, second):
        with pytest.raises(RefusedError, match="neither its asks nor the contract refer to payload"):
            fetch(fleet, identity, receipt.sha256)


def test_no_digest_names_no_payload(fleet: Fleet) -> None:
    """Neither in an ask without payload nor in a contract without initial weights."""
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError, match="neither its asks nor the contract refer to payload"):
        fetch(fleet, identity, b"")


def test_a_payload_that_went_with_its_round_is_not_found(fleet: Fleet) -> None:
    identity = fleet.join()
    payload = make_payload()
    fleet.ask(payload=payload)
    fleet.store.blobs.drop(payload.sha256)
    with pytest.raises(StoreError):  # while the ask is open, that is a fault of the server
        fetch(fleet, identity, payload.sha256)
    fleet.store.asks.close(1, "round closed")
    with pytest.raises(RefusedError) as error:
        fetch(fleet, identity, payload.sha256)
    assert (error.value.code, str(error.value)) == (
        Code.NOT_FOUND,
        f"device d1: payload {payload.sha256.hex()} was deleted because its round is over",
    )


def test_the_initial_weights_are_for_every_device_of_the_run(store: Store) -> None:
    initial = make_payload(2)
    store.blobs.put(initial)
    fleet = Fleet(store, initial_weights=initial.sha256)
    assert fetch(fleet, fleet.join(), initial.sha256)[1] == data_of(initial)


def test_extractor_file_is_for_every_device_of_run_and_no_other(store: Store) -> None:
    file = encode({"extractor": NetworkFile(onnx=np.arange(50, dtype=np.uint8))})
    store.blobs.put(file)
    fleet = Fleet(store, extractor_file=file.sha256)
    for device in ("d1", "d2"):
        assert fetch(fleet, fleet.join(device), file.sha256)[1] == bytes(range(50))
    with pytest.raises(RefusedError) as error:
        fetch(fleet, make_identity("stranger", b"s" * 32), file.sha256)
    assert error.value.code == Code.BAD_IDENTITY


@pytest.mark.parametrize("first_byte", [0, 1, 40, 127, 128, 10**9])
def test_a_download_goes_on_at_any_byte_and_counts_what_it_sends(fleet: Fleet, first_byte: int) -> None:
    identity = fleet.join()
    payload = make_payload()
    fleet.ask(payload=payload)
    result, data = fetch(fleet, identity, payload.sha256, first_byte)
    assert (result.header(), data) == (payload.header(), data_of(payload)[first_byte:])
    (row,) = fleet.store.history.traffic(RUN)
    assert (row.direction, row.round, row.tensor_bytes) == ("down", 1, len(data))
    assert row.envelope_bytes == payload.header().ByteSize()


def test_counted_downloads_are_those_of_devices_that_fetch(store: Store) -> None:
    """The payloads of the contract and of the ask, once each, though an ask may name one of the contract."""
    initial, payload = make_payload(2), make_payload()
    for item in (initial, payload):
        store.blobs.put(item)
    fleet = Fleet(store, initial_weights=initial.sha256)
    fetching = fleet.join("d1")
    fleet.join("d2")
    fleet.ask("d1", "d2", payload=payload)
    for item in (initial, payload):
        fetch(fleet, fetching, item.sha256)
    fleet.api.downloads.count(RUN, [(1, "d2", payload.sha256)])
    counts = {
        row.device: (row.direction, row.payloads, row.tensor_bytes, row.envelope_bytes, row.sent_bytes)
        for row in store.history.traffic(RUN)
        if row.round == 1
    }
    whole = [row for row in store.history.traffic(RUN) if row.device == "d1"]
    assert counts["d2"][1] == sum(row.payloads for row in whole) == 2
    assert counts["d2"][2] == sum(row.tensor_bytes for row in whole)
    assert counts["d2"][3] == sum(row.envelope_bytes for row in whole)
    assert counts["d2"][4] == sum(row.sent_bytes for row in whole)
    fleet.api.downloads.count(RUN, [])
    assert sum(row.payloads for row in store.history.traffic(RUN)) == 4


def test_a_download_counts_for_the_round_of_its_ask(fleet: Fleet) -> None:
    """A slow device still fetches the question of a round that is over, or has two asks open."""
    identity = fleet.join()
    old, new = make_payload(), make_payload(5)
    fleet.ask(payload=old)
    fleet.store.blobs.put(new)
    row: Row = {"run": RUN, "round": 2, "step_number": 1, "step": "train", "expects": EXPECTS, "seed": 7}
    row |= {"payload": new.sha256, "payload_bytes": new.data_bytes, "deadline_at": time.time() + 600, "device": "d1"}
    fleet.store.asks.add([Ask(**row)])
    fetch(fleet, identity, new.sha256)
    fleet.store.asks.close(1, "round closed")
    fetch(fleet, identity, old.sha256)
    assert {row.round: row.tensor_bytes for row in fleet.store.history.traffic(RUN)} == {
        1: old.data_bytes,
        2: new.data_bytes,
    }
