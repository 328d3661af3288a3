"""Everything from a device is hostile: sizes, chunks, digests, and uploads that go on."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from intake.taken_in import FLOAT32, declaring, refusal, said, take_in
from support.wire_samples import (
    CUT_SHAPE,
    EXPECTS,
    cut_at,
    data_of,
    f32,
    i32,
    in_pieces,
    make_chunk,
    make_contract,
    make_knowledge,
    make_metrics,
    make_payload,
)

from fleetdistill import knowledge as k
from fleetdistill.errors import RefusedError
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import CHUNK_BYTES, slots
from fleetdistill.wire.v1 import knowledge_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs


def test_what_an_earlier_stream_has_checked_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, contract = make_payload(rows=50), make_contract()
    staging = MemoryBlobs().stage("key", payload.parts)
    pieces = in_pieces(payload, 7)
    first, second, other = (Ingest("d1", payload.header(), contract, EXPECTS) for _ in range(3))
    first.start(staging)
    for chunk in pieces[:100]:
        first.feed(chunk)
    read: list[int] = []
    real = staging.read
    monkeypatch.setattr(staging, "read", lambda start, size: read.append(size) or real(start, size))  # type: ignore[func-returns-value]
    assert second.start(staging, first) == staging.length > 0
    assert read == []
    for chunk in pieces[100:]:
        second.feed(chunk)
    assert other.start(staging, first) == staging.length, "the first knows less than is staged by now"
    assert sum(read) >= staging.length
    second.finish()


def test_parameters_must_be_exactly_the_declared_tensors() -> None:
    def sent(**parameters: Any) -> tuple[str, str]:
        payload = encode({"x": k.ModelParameters(parameters=parameters)})
        with pytest.raises(RefusedError) as error:
            Ingest("d1", payload.header(), contract, {"x": "model_parameters"})
        return said(error.value)

    good = encode({"x": k.ModelParameters(parameters={"w": f32([1, 2]), "b": f32([1])})})
    contract = declaring(make_contract(), good.header())
    Ingest("d1", good.header(), contract, {"x": "model_parameters"})
    assert sent(w=f32([1, 2])) == (Code.BAD_TENSOR, "device d1: part 'x' lacks parameters/b")
    assert sent(w=f32([1]), b=f32([1])) == (
        Code.BAD_TENSOR,
        "device d1: x/parameters/w has shape [1], expected [2]",
    )
    extra = sent(w=f32([1, 2]), b=f32([1]), v=f32([1]))
    assert extra == (Code.BAD_TENSOR, "device d1: tensor 'x/parameters/v' is not part of the contract")


def test_a_good_upload_is_taken() -> None:
    take_in(make_payload())
    take_in(encode({"knowledge": make_knowledge(), "metrics": make_metrics()}))
    take_in(make_payload(1))


# --- parts and tensors


def _with_shape(payload: Payload, field: str, shape: list[int]) -> knowledge_pb2.PayloadHeader:
    header = payload.header()
    sent = header.parts.parts[0].sample_knowledge
    tensor = sent.features[0].tensor if field == "features" else getattr(sent, field)
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    header.data_bytes = slots(header.parts)[-1].stop
    return header


# --- sizes


def test_payload_over_limit_is_refused_and_at_limit_is_accepted() -> None:
    payload = make_payload()
    size = payload.data_bytes
    take_in(payload, contract=make_contract(max_upload_bytes=size))
    error = refusal(payload, contract=make_contract(max_upload_bytes=size - 1), chunks=[])
    assert said(error) == (
        Code.TOO_LARGE,
        f"device d1: the payload is {size} bytes, the limit is {size - 1} bytes; "
        "send fewer samples per round, use half precision, or raise the limit",
    )


def test_tensor_of_trillion_elements_is_refused_without_memory() -> None:
    payload = make_payload(1)
    header = _with_shape(payload, "features", [1 << 38, *CUT_SHAPE])
    tracemalloc.start()
    error = refusal(payload, header=header, chunks=[])
    # Where the limit allows it, the rows disagree; and where they agree, nothing is set aside before it comes.
    unlimited = make_contract(max_upload_bytes=1 << 60)
    disagreeing = refusal(payload, header=header, chunks=[], contract=unlimited)
    parts = {"x": k.ModelParameters(parameters={"w": np.zeros(1, FLOAT32)})}
    big = encode(parts).header()
    big.parts.parts[0].model_parameters.parameters[0].tensor.shape[0] = 1 << 40
    big.data_bytes = 4 << 40
    cut_short = refusal(payload, header=big, chunks=[], contract=unlimited, expects={"x": "model_parameters"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert said(error) == (
        Code.TOO_LARGE,
        f"device d1: the payload is {header.data_bytes} bytes, the limit is 1048576 bytes; "
        "send fewer samples per round, use half precision, or raise the limit",
    )
    assert said(disagreeing) == (
        Code.BAD_TENSOR,
        "device d1: knowledge/features/cut has 274877906944 rows, but knowledge/sample_ids has 1; they must agree",
    )
    assert said(cut_short) == (Code.INCOMPLETE, f"device d1: the stream ended after 0 of {4 << 40} bytes")
    assert peak < 1 << 20


@pytest.mark.parametrize("change", [-1, 1])
def test_a_declared_size_that_is_not_the_tensors_size_is_refused(change: int) -> None:
    payload = make_payload()
    header = payload.header()
    header.data_bytes += change
    error = refusal(payload, header=header, chunks=[])
    size = payload.data_bytes
    assert said(error) == (
        Code.BAD_MESSAGE,
        f"device d1: the header declares {size + change} data bytes, but its tensors have {size}",
    )


@pytest.mark.parametrize("sha256", [b"", b"s" * 31, b"s" * 33])
def test_a_digest_of_another_length_is_refused(sha256: bytes) -> None:
    header = make_payload().header()
    header.sha256 = sha256
    error = refusal(make_payload(), header=header, chunks=[])
    assert error.code == Code.BAD_MESSAGE
    assert str(error) == f"device d1: the header's SHA-256 has {len(sha256)} bytes, expected 32"


# --- chunks


def _stream(payload: Payload) -> list[knowledge_pb2.Chunk]:
    return in_pieces(payload, 8)


def test_chunk_with_wrong_checksum_is_refused_naming_its_place() -> None:
    chunks = _stream(make_payload())
    chunks[5].crc32c ^= 1
    error = refusal(make_payload(), chunks=chunks)
    assert said(error) == (
        Code.CHECKSUM,
        "device d1: a chunk at byte 40 fails its CRC-32C check; send it again",
    )
    assert error.details["tensor"] == "knowledge/features/cut"


@pytest.mark.parametrize("size", [1, 7, 40, 1 << 20])
def test_the_place_of_a_bad_value_is_told_however_data_are_cut(size: int) -> None:
    """Also in a chunk that covers several tensors."""
    payload = make_payload(labels=i32([1, 2, 9, 0]))
    error = refusal(payload, chunks=in_pieces(payload, size))
    assert said(error) == (Code.BAD_VALUE, "device d1: label 9 outside [0, 3) at row 2 of knowledge/labels")
    assert (error.details["tensor"], error.details["row"]) == ("knowledge/labels", "2")


def test_a_changed_byte_is_found_by_the_checksum() -> None:
    chunks = _stream(make_payload())
    chunks[0].data = bytes([chunks[0].data[0] ^ 1]) + chunks[0].data[1:]
    assert refusal(make_payload(), chunks=chunks).code == Code.CHECKSUM


def test_data_that_are_not_what_the_digest_names_are_refused() -> None:
    """Each chunk is whole and each value fits, but they are another payload's."""
    other = make_payload(labels=i32([2, 2, 2, 2]))
    error = refusal(other, header=make_payload().header())
    assert said(error) == (
        Code.CHECKSUM,
        "device d1: the SHA-256 of parts and data does not match the header",
    )


def test_parts_that_are_not_what_the_digest_names_are_refused() -> None:
    payload = make_payload()
    header = payload.header()
    header.sha256 = digest(knowledge_pb2.Parts(), iter([data_of(payload)]))
    assert refusal(payload, header=header).code == Code.CHECKSUM


def test_an_upload_that_ends_early_is_incomplete() -> None:
    payload = make_payload()
    chunks = _stream(payload)
    left_out = len(chunks[-1].data)
    error = refusal(payload, chunks=chunks[:-1])
    assert said(error) == (
        Code.INCOMPLETE,
        f"device d1: the stream ended after {payload.data_bytes - left_out} of {payload.data_bytes} bytes",
    )


def test_an_upload_that_goes_on_after_its_end_is_refused() -> None:
    payload = make_payload()
    error = refusal(payload, chunks=[*_stream(payload), make_chunk(payload.data_bytes, b"more")])
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: a chunk ends at byte 164, but the payload has 160 bytes",
    )


def test_a_chunk_over_the_end_of_the_payload_is_refused() -> None:
    payload = make_payload()
    error = refusal(payload, chunks=[make_chunk(payload.data_bytes - 4, bytes(8))])
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: a chunk ends at byte 164, but the payload has 160 bytes",
    )


@pytest.mark.parametrize("size", [0, CHUNK_BYTES + 1])
def test_chunks_that_are_empty_or_too_large_are_refused(size: int) -> None:
    payload = encode({"x": k.ModelParameters(parameters={"w": np.zeros(CHUNK_BYTES, FLOAT32)})})
    contract = make_contract(max_upload_bytes=8 * CHUNK_BYTES)
    chunks = [make_chunk(0, bytes(size))]
    error = refusal(payload, contract=contract, chunks=chunks, expects={"x": "model_parameters"})
    assert said(error) == (Code.BAD_MESSAGE, f"device d1: a chunk has {size} bytes, must be 1 to 1048576")
    take_in(payload, contract=contract, expects={"x": "model_parameters"})


@pytest.mark.parametrize(
    ("order", "start", "expected"), [([1], 8, 0), ([0, 2], 16, 8), ([0, 0], 0, 8), ([0, 4], 32, 8)]
)
def test_chunks_out_of_order_are_refused(order: list[int], start: int, expected: int) -> None:
    chunks = _stream(make_payload())
    error = refusal(make_payload(), chunks=[chunks[at] for at in order])
    assert said(error) == (
        Code.OUT_OF_STEP,
        f"device d1: a chunk starts at byte {start}, expected {expected}",
    )


# --- going on where an earlier stream broke off


@given(st.data())
def test_an_upload_that_goes_on_is_checked_like_a_whole_one(data: st.DataObject) -> None:
    payload = make_payload(6)
    whole = data_of(payload)
    staging = MemoryBlobs().stage("key", payload.parts)
    held = data.draw(st.integers(0, len(whole)))
    staging.append(whole[:held])
    ingest = Ingest("d1", payload.header(), make_contract(), EXPECTS)
    assert ingest.start(staging) == held
    places = {held, *data.draw(st.sets(st.integers(0, len(whole)), max_size=5))}
    for chunk in cut_at(whole, places):
        if chunk.offset >= held:
            ingest.feed(chunk)
    ingest.finish()
    assert staging.read(0, len(whole)) == whole


def test_what_was_staged_is_not_trusted() -> None:
    features = np.zeros((4, *CUT_SHAPE), FLOAT32)
    features[2] = np.nan
    payload = make_payload(features={"cut": features})
    staging = MemoryBlobs().stage("key", payload.parts)
    staging.append(data_of(payload)[:-1])
    ingest = Ingest("d1", payload.header(), make_contract(), EXPECTS)
    with pytest.raises(RefusedError, match="non-finite features at row 2 of knowledge/features/cut") as error:
        ingest.start(staging)
    assert error.value.code == Code.CHECKSUM  # our disk's fault, not the device's: it may send the upload again


def test_more_staged_bytes_than_the_payload_has_are_refused() -> None:
    payload = make_payload()
    size = payload.data_bytes
    staging = MemoryBlobs().stage("key", payload.parts)
    staging.append(data_of(payload) + b"x")
    ingest = Ingest("d1", payload.header(), make_contract(), EXPECTS)
    with pytest.raises(RefusedError, match=f"{size + 1} bytes are staged, but the payload has {size}"):
        ingest.start(staging)
