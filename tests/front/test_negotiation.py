"""How device and server agree on packing at check-in, what it changes and what is counted; what reflection tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.live_front import RUN, live_front, open_round, write_asks
from support.processes import PATIENCE_SECONDS
from support.wire_samples import data_of, make_contract, make_identity, make_knowledge, make_profile

from fleetdistill.knowledge import Plan
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.compression import RAW, ZSTD
from fleetdistill.wire.v1 import contract_pb2, service_pb2, tensor_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.store import Store

SECRET = b"s" * 32
IDENTITY = make_identity("d1", SECRET)
UINT8 = {"knowledge_type": tensor_pb2.ELEMENT_TYPE_UINT8, "max_upload_bytes": 1 << 24}


def asked(knowledge: Payload, compression: Any = ZSTD) -> DeviceApi:
    """A device API in a run of uint8, with one device that was asked something."""
    store = Store.in_memory()
    store.runs.begin(RUN, {"made": "by hand"})
    store.runs.publish_contract(RUN, make_contract(run=RUN, **UINT8).SerializeToString())
    api = DeviceApi(store, compression=compression)
    check_in(api, profile([ZSTD]))
    open_round(store, "d1")
    write_asks(store, 1, "d1", payload=knowledge)
    return api


def profile(compressions: list[Any]) -> contract_pb2.DeviceProfile:
    return make_profile(knowledge_types=[tensor_pb2.ELEMENT_TYPE_UINT8], compressions=compressions)


def check_in(api: DeviceApi, of: contract_pb2.DeviceProfile | None) -> service_pb2.CheckInResponse:
    return api.check_in(service_pb2.CheckInRequest(identity=IDENTITY, profile=of))


def answer(rows: int = 2000) -> Payload:
    features = {"cut": np.zeros((rows, 2, 2), np.float32)}
    return encode({"knowledge": make_knowledge(rows, features=features)}, np.uint8)


def question() -> Payload:
    return encode({"teacher": make_knowledge(2000), "plan": Plan(values={"cut": 1})}, np.float16)


def upload(api: DeviceApi, payload: Payload, compression: Any, first_byte: int = 0, stop: int | None = None) -> None:
    """Sends the answer in one stream, which breaks before the chunk number `stop`."""
    name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
    header = service_pb2.UploadHeader(
        identity=IDENTITY, name=name, payload=payload.header(), samples=4, first_byte=first_byte
    )
    session = api.uploads.begin(header)
    for chunk in list(wire.chunks(payload.source, payload.slots, first_byte, compression))[:stop]:
        session.feed(chunk)
    if stop is None:
        session.finish()
    session.abandon()


def counted(api: DeviceApi, direction: str) -> dict[str, tuple[int, int]]:
    """Tensor bytes and bytes as they travelled, by kind."""
    rows = [row for row in api.store.history.traffic_by_kind(RUN) if row.direction == direction]
    assert {(row.round, row.device) for row in rows} <= {(1, "d1")}
    return {row.kind: (row.tensor_bytes, row.sent_bytes) for row in rows}


# --- at check-in


def test_a_device_packs_only_what_it_and_the_server_want() -> None:
    api = asked(question())
    assert check_in(api, profile([ZSTD])).compression == ZSTD
    assert check_in(api, profile([])).compression == RAW  # also a device of the version before
    assert check_in(api, profile([9, ZSTD])).compression == ZSTD  # one of a later version
    api.compression = RAW
    assert check_in(api, profile([ZSTD])).compression == RAW


# --- what travels, and what is counted


def test_an_answer_is_stored_and_counted_the_same_packed_or_not() -> None:
    payload, result = answer(), {}
    for compression in (RAW, ZSTD):
        api = asked(question())
        upload(api, payload, compression)
        (row,) = api.store.asks.uploads(RUN)
        assert data_of(api.store.blobs.open(row.sha256)) == data_of(payload)
        result[compression] = counted(api, "up")
        assert result[compression]["envelope"] == (0, payload.header().ByteSize())
        (total,) = [item for item in api.store.history.traffic(RUN) if item.direction == "up"]
        assert (total.tensor_bytes, total.payloads) == (payload.data_bytes, 1)
        assert total.sent_bytes == sum(sent for _, sent in result[compression].values())
    chunks = wire.chunks(payload.source, payload.slots, 0, ZSTD)
    assert result[RAW]["sample_knowledge"] == (payload.data_bytes, payload.data_bytes)
    assert result[ZSTD]["sample_knowledge"] == (payload.data_bytes, sum(len(chunk.data) for chunk in chunks))
    assert result[ZSTD]["sample_knowledge"][1] < payload.data_bytes / 3


def test_an_answer_in_two_streams_counts_its_tensors_once() -> None:
    api, payload = asked(question()), answer(20_000)
    first, second, *_ = wire.chunks(payload.source, payload.slots, 0, ZSTD)
    upload(api, payload, ZSTD, stop=1)
    assert counted(api, "up") == {}
    held = second.offset
    assert first.offset == 0
    upload(api, payload, ZSTD, first_byte=held)
    rest = sum(len(chunk.data) for chunk in wire.chunks(payload.source, payload.slots, held, ZSTD))
    assert counted(api, "up")["sample_knowledge"] == (payload.data_bytes, held + rest)


def download(api: DeviceApi, payload: Payload, compressions: list[Any], first_byte: int = 0) -> Any:
    request = service_pb2.DownloadRequest(
        identity=IDENTITY, sha256=payload.sha256, first_byte=first_byte, compressions=compressions
    )
    return api.downloads.open(request)


@pytest.mark.parametrize(("offered", "packed"), [([], False), ([9], False), ([ZSTD], True)])
def test_download_is_packed_for_device_that_says_so_and_counted(offered: list[Any], packed: bool) -> None:
    payload = question()
    api = asked(payload)
    chunks = list(download(api, payload, offered))
    assert b"".join(wire.chunk_data(chunk) for chunk in chunks) == data_of(payload)
    assert any(chunk.compression == ZSTD for chunk in chunks) == packed
    sent = sum(len(chunk.data) for chunk in chunks)
    header = payload.header().ByteSize()
    assert counted(api, "down") == {"envelope": (0, header), "sample_knowledge": (payload.data_bytes, sent)}
    assert (sent < payload.data_bytes) == packed


def test_a_server_that_packs_nothing_packs_no_download() -> None:
    payload = question()
    api = asked(payload, RAW)
    assert {chunk.compression for chunk in download(api, payload, [ZSTD])} == {RAW}


def test_a_download_that_breaks_counts_what_was_taken_once() -> None:
    payload = question()
    api = asked(payload)
    chunks = download(api, payload, [])
    first = next(chunks)
    chunks.end()
    chunks.end()
    assert next(chunks, None) is None
    assert counted(api, "down")["sample_knowledge"] == (len(first.data), len(first.data))
    (row,) = api.store.history.traffic(RUN)
    assert row.payloads == 1


# --- over the network


def test_reflection_lists_the_services_and_their_messages(tmp_path: Path) -> None:
    with live_front(tmp_path) as front, grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="fleetdistill.wire.v1.DeviceService"),
        ]
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=PATIENCE_SECONDS)
    assert {item.name for item in listed.list_services_response.service} >= {
        "fleetdistill.wire.v1.DeviceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert any(b"CheckInRequest" in item for item in described.file_descriptor_response.file_descriptor_proto)
