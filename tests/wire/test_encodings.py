"""Small encodings: numbers as steps of one byte, and chunks packed for the way."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.wire_samples import (
    CUT_SHAPE,
    EXPECTS,
    data_of,
    f32,
    in_pieces,
    make_contract,
    make_knowledge,
    make_profile,
)

from fleetdistill.errors import KnowledgeError, RefusedError, WireError
from fleetdistill.knowledge import ProxyKnowledge, RefinedKnowledge, SampleKnowledge
from fleetdistill.link.downloads import BytesSource
from fleetdistill.models import build_model
from fleetdistill.wire import compression
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import RAW, ZSTD, Packer, choose, unpack
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import (
    CHUNK_BYTES,
    LARGEST,
    MAX_SCALE,
    chunk_data,
    chunks,
    dequantize,
    quantize,
    slot_at,
    slots,
)
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, tensor_pb2
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs

UINT8 = make_contract(knowledge_type=tensor_pb2.ELEMENT_TYPE_UINT8)
NUMBERS = st.floats(-LARGEST, LARGEST, width=32)
COLUMNS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=5), elements=NUMBERS)


def of_channels(per_channel: Any, like: Any) -> Any:
    return per_channel.reshape(1, -1, *[1] * (like.ndim - 2))


# --- numbers as steps of their channel


@given(COLUMNS)
def test_a_number_is_off_by_at_most_half_a_step_of_its_channel(numbers: Any) -> None:
    elements, step, minimum = quantize(numbers)
    result = dequantize(elements, step, minimum)
    assert (result.dtype, result.shape, elements.dtype) == (np.float32, numbers.shape, np.uint8)  # type: ignore[comparison-overlap]
    assert step.shape == minimum.shape == numbers.shape[1:2]
    rounding = np.spacing(np.abs(numbers)) + of_channels(255 * np.spacing(step), numbers) + 2.0**-110
    assert (np.abs(result.astype(np.float64) - numbers) <= of_channels(step, numbers) / 2 + rounding).all()


@given(COLUMNS)
def test_encoding_again_what_was_decoded_changes_nothing(numbers: Any) -> None:
    elements, step, minimum = quantize(numbers)
    finest = np.spacing(np.abs(numbers).max(initial=0))  # below it, what is decoded is rounded to another number
    assume(((step == 0) | (step >= 4 * finest)).all())
    again, step_again, minimum_again = quantize(dequantize(elements, step, minimum))
    np.testing.assert_array_equal(minimum_again, minimum)
    np.testing.assert_allclose(step_again, step, rtol=1e-3)
    np.testing.assert_array_equal(again, elements)


@given(COLUMNS, st.integers(0, 4))
def test_a_channel_is_encoded_by_itself(numbers: Any, channel: int) -> None:
    assume(numbers.size and channel < numbers.shape[1])
    alone = quantize(numbers[:, channel : channel + 1])
    for one, whole in zip(alone, quantize(numbers), strict=True):
        part = whole[:, channel : channel + 1] if whole.ndim > 1 else whole[channel : channel + 1]
        np.testing.assert_array_equal(one, part)


@given(NUMBERS, st.integers(1, 5))
def test_numbers_that_are_all_alike_come_back_exactly(number: float, rows: int) -> None:
    numbers = np.full((rows, 1, 2), number, np.float32)
    elements, step, minimum = quantize(numbers)
    assert (int(elements.max()), float(step[0])) == (0, 0.0)
    np.testing.assert_array_equal(dequantize(elements, step, minimum), numbers)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2, 2), (2, 0), (2, 3, 0)])
def test_a_column_without_numbers_is_encoded_too(shape: tuple[int, ...]) -> None:
    elements, step, minimum = quantize(np.zeros(shape, np.float32))
    assert dequantize(elements, step, minimum).shape == shape
    assert not step.any()
    assert not minimum.any()


def test_the_ends_of_a_channel_come_back_exactly_and_by_hand() -> None:
    elements, step, minimum = quantize(f32([[0, -1], [255, 1], [100.4, 0.3]]))
    np.testing.assert_array_equal(elements, [[0, 0], [255, 255], [100, 166]])  # 1.3 / (2 / 255) = 165.75
    np.testing.assert_allclose(step, [1, 2 / 255])
    np.testing.assert_array_equal(minimum, [0, -1])


# --- what travels in steps


def encoded(rows: int = 4, **changes: Any) -> Payload:
    return encode({"knowledge": make_knowledge(rows, **changes)}, np.uint8)


def test_only_feature_columns_use_steps_and_rest_uses_float16() -> None:
    parts = {
        "knowledge": make_knowledge(
            2, features={"map": np.ones((2, 3, 4, 4)), "row": np.ones((2, 5)), "one": f32([1, 2])}
        ),
        "teacher": RefinedKnowledge(valid=True, sample_ids=np.arange(2), values=np.ones((2, 3))),
        "proxy": ProxyKnowledge(valid=True, logits=np.ones((2, 3)), embeddings=np.ones((2, 5))),
    }
    result = {slot.path: (slot.dtype.name, slot.shape) for slot in encode(parts, np.uint8).slots}
    assert result == {
        "knowledge/sample_ids": ("int64", (2,)),
        "knowledge/features/map": ("uint8", (2, 3, 4, 4)),
        "knowledge/features/map/step": ("float32", (3,)),
        "knowledge/features/map/minimum": ("float32", (3,)),
        "knowledge/features/row": ("uint8", (2, 5)),
        "knowledge/features/row/step": ("float32", (5,)),
        "knowledge/features/row/minimum": ("float32", (5,)),
        "knowledge/features/one": ("float16", (2,)),
        "knowledge/logits": ("float16", (2, 3)),
        "knowledge/labels": ("int32", (2,)),
        "teacher/sample_ids": ("int64", (2,)),
        "teacher/values": ("float16", (2, 3)),
        "proxy/logits": ("float16", (2, 3)),
        "proxy/embeddings": ("float16", (2, 5)),
    }


def test_a_method_sees_float32_and_never_a_step() -> None:
    sent = make_knowledge()
    (result,) = decode(encoded()).values()
    assert isinstance(result, SampleKnowledge)
    assert (result.features["cut"].dtype, result.logits.dtype) == (np.float32, np.float16)  # type: ignore[comparison-overlap, union-attr]
    np.testing.assert_allclose(result.features["cut"], sent.features["cut"], atol=1.5 / 255 / 2 + 1e-6)
    with pytest.raises(ValueError, match="read-only"):
        result.features["cut"][0] = 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65520.0, -65520.0])
def test_a_number_that_has_no_step_is_the_device_s_own_error(value: float) -> None:
    features = np.zeros((5, *CUT_SHAPE), np.float32)
    features[3, 1, 0] = value
    with pytest.raises(KnowledgeError) as error:
        encoded(5, features={"cut": features})
    assert str(error.value) == (
        f"knowledge/features/cut, row 3: {value:g} does not fit uint8 (largest 65504 for float16 and uint8); "
        "use float32 for this run or scale the features down"
    )


def test_the_largest_numbers_fit_and_pass_the_server() -> None:
    features = np.full((2, *CUT_SHAPE), LARGEST, np.float32)
    features[1] = -LARGEST
    payload = encoded(2, features={"cut": features})
    take_in(payload)
    (result,) = decode(payload).values()
    assert isinstance(result, SampleKnowledge)
    np.testing.assert_allclose(result.features["cut"], features, rtol=1e-6)


# --- hostile columns


def take_in(payload: Payload, contract: contract_pb2.Contract = UINT8, sent: Any = None) -> Ingest:
    ingest = Ingest("d1", payload.header(), contract, EXPECTS)
    ingest.start(MemoryBlobs().stage("key", payload.parts))
    for chunk in sent if sent is not None else in_pieces(payload, CHUNK_BYTES):
        ingest.feed(chunk)
    ingest.finish()
    return ingest


def refusal(payload: Payload, **how: Any) -> tuple[str, str]:
    with pytest.raises(RefusedError) as error:
        take_in(payload, **how)
    return error.value.code, str(error.value).removeprefix("device d1: ")


def with_data(payload: Payload, path: str, data: bytes) -> Payload:
    """The payload with other bytes for one tensor, and the digest of these."""
    (slot,) = [slot for slot in payload.slots if slot.path == path]
    whole = data_of(payload)
    changed = whole[: slot.start] + data + whole[slot.stop :]
    return Payload(payload.parts, payload.slots, BytesSource(changed), digest(payload.parts, iter([changed])))


def test_a_column_in_steps_is_taken() -> None:
    payload = encoded()
    ingest = take_in(payload)
    assert [slot.kind for slot in ingest.slots] == ["sample_knowledge"] * len(payload.slots)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("step", [1, np.nan], "non-finite step at row 1"),
        ("step", [np.inf, 1], "non-finite step at row 0"),
        ("step", [1, -1e-9], "step -1e-09 outside [0, 513.757) at row 1"),
        (
            "step",
            [np.nextafter(np.float32(MAX_SCALE), np.float32(1e9)), 1],
            "step 513.757 outside [0, 513.757) at row 0",
        ),
        ("minimum", [0, np.nan], "non-finite minimum at row 1"),
        ("minimum", [65504.5, 0], "minimum 65504.5 outside [-65504, 65504) at row 0"),
        ("minimum", [0, -65504.5], "minimum -65504.5 outside [-65504, 65504) at row 1"),
    ],
)
def test_scales_that_would_make_numbers_of_no_use_are_refused(name: str, values: Any, said: str) -> None:
    path = f"knowledge/features/cut/{name}"
    payload = with_data(encoded(), path, np.array(values, np.float32).tobytes())
    assert refusal(payload) == (Code.BAD_VALUE, f"{said} of {path}")


def malformed(change: Any) -> Payload:
    """A payload whose description of the column is changed."""
    payload = encoded()
    parts = knowledge_pb2.Parts.FromString(payload.parts.SerializeToString())
    change(parts.parts[0].sample_knowledge.features[0].tensor)
    return Payload(parts, payload.slots, payload.source, payload.sha256)


def _shape(tensor: Any, *shape: int) -> None:
    del tensor.shape[:]
    tensor.shape.extend(shape)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.ClearField("channels"),
            "tensor 'knowledge/features/cut' must have steps and minima of its channels",
        ),
        (
            lambda t: setattr(t, "encoding", tensor_pb2.ENCODING_RAW),
            "tensor 'knowledge/features/cut' must not have steps and minima of its channels",
        ),
        (lambda t: t.channels.ClearField("step"), "tensor 'knowledge/features/cut/step' has encoding 0"),
        (lambda t: t.channels.ClearField("minimum"), "tensor 'knowledge/features/cut/minimum' has encoding 0"),
        (
            lambda t: _shape(t.channels.step, 3),
            "tensor 'knowledge/features/cut/step' is float32 [3], must be raw float32 [2]",
        ),
        (
            lambda t: _shape(t.channels.step),
            "tensor 'knowledge/features/cut/step' is float32 [], must be raw float32 [2]",
        ),
        (
            lambda t: setattr(t.channels.minimum, "element_type", tensor_pb2.ELEMENT_TYPE_FLOAT64),
            "tensor 'knowledge/features/cut/minimum' is float64 [2], must be raw float32 [2]",
        ),
        (
            lambda t: t.channels.step.CopyFrom(type(t).FromString(t.SerializeToString())),
            "tensor 'knowledge/features/cut/step' is uint8 [4, 2, 2], must be raw float32 [2]",
        ),
        (
            lambda t: setattr(t, "element_type", tensor_pb2.ELEMENT_TYPE_FLOAT16),
            "tensor 'knowledge/features/cut' is float16 [4, 2, 2]; channel steps must be uint8 with at least two axes",
        ),
        (
            lambda t: _shape(t, 16),
            "tensor 'knowledge/features/cut' is uint8 [16]; channel steps must be uint8 with at least",
        ),
        (lambda t: setattr(t.channels.step, "data", b"1234"), "'knowledge/features/cut/step' has its data"),
    ],
)
def test_a_column_that_does_not_describe_itself_is_refused(change: Any, said: str) -> None:
    payload = malformed(change)
    with pytest.raises(WireError) as error:
        slots(payload.parts)
    assert said in str(error.value)
    code, sentence = refusal(payload)
    assert (code, said in sentence) == (Code.BAD_MESSAGE, True)


def test_a_column_in_another_encoding_than_the_run_s_is_refused() -> None:
    raw = encode({"knowledge": make_knowledge()}, np.float16)
    assert refusal(raw) == (Code.BAD_TENSOR, "knowledge/features/cut is float16, expected uint8")
    half = make_contract(knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT16)
    assert refusal(encoded(), contract=half) == (Code.BAD_TENSOR, "knowledge/features/cut is uint8, expected float16")
    bare = malformed(lambda t: (t.ClearField("channels"), setattr(t, "encoding", tensor_pb2.ENCODING_RAW)))  # type: ignore[func-returns-value]
    bare = Payload(bare.parts, slots(bare.parts), bare.source, bare.sha256)
    assert refusal(bare) == (Code.BAD_TENSOR, "knowledge/features/cut is raw, expected quantised per channel")


def test_device_ignorant_of_steps_is_refused_at_check_in() -> None:
    check_profile(UINT8, make_profile(knowledge_types=[tensor_pb2.ELEMENT_TYPE_UINT8]))
    with pytest.raises(RefusedError) as error:
        check_profile(UINT8, make_profile())
    assert (error.value.code, str(error.value)) == (
        Code.CONTRACT_MISMATCH,
        "element type: the device has float32, float16, run 'digits' has uint8; "
        "update the device's SDK, or choose another knowledge_type for the run",
    )


# --- chunks that are packed


@given(st.data())
def test_packed_chunks_from_any_byte_hold_the_rest_of_the_data(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    payload = encoded(rows)
    first = data.draw(st.integers(0, payload.data_bytes))
    sent = list(chunks(payload.source, payload.slots, first, ZSTD))
    assert b"".join(chunk_data(chunk) for chunk in sent) == data_of(payload)[first:]
    place = first
    for chunk in sent:
        assert chunk.offset == place
        assert google_crc32c.value(bytes(chunk.data)) == chunk.crc32c
        assert (chunk.compression == ZSTD) == (len(chunk.data) < len(chunk_data(chunk)))
        place += len(chunk_data(chunk))


def test_packed_or_not_a_payload_arrives_the_same() -> None:
    payload = encoded(500)
    packed = list(chunks(payload.source, payload.slots, 0, ZSTD))
    assert ZSTD in {chunk.compression for chunk in packed}
    ingest = take_in(payload, sent=packed)
    assert ingest.header.sha256 == payload.sha256


def test_tensor_that_hardly_shrinks_is_sent_raw_and_next_tried() -> None:
    packer = Packer(ZSTD)
    noise, zeros = np.random.default_rng(0).bytes(4096), bytes(4096)
    assert packer.pack(noise) == (noise, RAW)
    assert packer.pack(zeros) == (zeros, RAW)
    packer.next_range()
    assert packer.pack(zeros)[1] == ZSTD
    assert Packer(RAW).pack(zeros) == (zeros, RAW)


def packed(data: bytes, **how: Any) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(data)


def streamed(data: bytes) -> bytes:
    """A frame that does not say how much it holds."""
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(data) + writer.flush()


def lying() -> bytes:
    """A frame that says 100 bytes and holds 64."""
    frame = bytearray(packed(bytes(range(64)), write_checksum=False))
    assert frame[5] == 64
    frame[5] = 100
    return bytes(frame)


BAD_FRAMES = {
    "a bomb of 64 MiB": (packed(bytes(1 << 26)), "states a size of 67108864 bytes, must be 1 to 1048576"),
    "one byte over a chunk": (packed(bytes(CHUNK_BYTES + 1)), "states a size of 1048577 bytes, must be 1 to 1048576"),
    "no size": (streamed(bytes(64)), "does not state its size, must be 1 to 1048576"),
    "nothing in it": (packed(b""), "states a size of 0 bytes, must be 1 to 1048576"),
    "no frame": (b"not a frame, this", "is damaged"),
    "empty": (b"", "is damaged"),
    "cut off": (packed(bytes(range(200)))[:-9], "is damaged"),
    "something behind it": (packed(bytes(64)) + b"more", "is damaged"),
    "two frames": (packed(bytes(64)) * 2, "is damaged"),
    "another size than it says": (lying(), "is damaged"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_is_no_chunk_is_refused(name: str) -> None:
    frame, said = BAD_FRAMES[name]
    chunk = knowledge_pb2.Chunk(data=frame, crc32c=google_crc32c.value(frame), compression=ZSTD)
    code, sentence = refusal(encoded(), sent=[chunk])
    assert code == Code.BAD_MESSAGE
    assert f"a chunk's zstd frame {said}" in sentence


def test_a_compression_that_nobody_knows_is_refused() -> None:
    chunk = knowledge_pb2.Chunk(data=b"x", crc32c=google_crc32c.value(b"x"), compression=9)  # type: ignore[arg-type]
    said = "a chunk has unsupported compression 9, expected one of COMPRESSION_UNSPECIFIED, COMPRESSION_ZSTD"
    assert refusal(encoded(), sent=[chunk]) == (Code.BAD_MESSAGE, said)


def test_the_checksum_is_over_the_bytes_as_sent() -> None:
    payload = encoded(500)
    sent = list(chunks(payload.source, payload.slots, 0, ZSTD))
    data = bytes(sent[0].data)
    sent[0] = sent[0]._replace(data=data[:-1] + bytes([data[-1] ^ 1]))
    assert refusal(payload, sent=sent)[0] == Code.CHECKSUM


@given(st.binary(max_size=300))
def test_no_bytes_make_the_decoder_do_anything_but_refuse(data: bytes) -> None:
    for frame in (data, packed(bytes(64))[:6] + data):
        with contextlib.suppress(WireError):
            assert len(unpack(frame, ZSTD, 100)) <= 100


# --- who uses what


def test_both_ends_must_know_a_compression() -> None:
    assert choose(ZSTD, [ZSTD]) == ZSTD
    assert choose(ZSTD, []) == choose(RAW, [ZSTD]) == RAW


@pytest.fixture
def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zstandard" else find(name))
    compression.offered.cache_clear()
    yield
    compression.offered.cache_clear()


@pytest.mark.usefixtures("without_zstandard")
def test_without_library_nothing_packed_is_offered_or_taken() -> None:
    assert compression.offered() == ()
    assert choose(ZSTD, [ZSTD]) == RAW
    with pytest.raises(WireError, match="unsupported compression 1, expected one of COMPRESSION_UNSPECIFIED"):
        unpack(packed(b"x"), ZSTD, 100)


# --- real digits


def test_real_features_shrink_and_decide_the_same() -> None:
    """All 1,797 digits through the run's extractor, untrained, and the least-squares classifier on top of it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    torch.manual_seed(0)
    extractor = build_model("digits_extractor", input_shape=(1, 8, 8)).eval()
    with torch.no_grad():
        features = extractor(torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)).numpy()
    head = np.linalg.lstsq(features.reshape(len(labels), -1), np.eye(10)[labels], rcond=None)[0]
    sizes, agree = {}, {}
    for name in ("float32", "float16", "uint8"):
        knowledge = SampleKnowledge(sample_ids=np.arange(len(labels)), features={"cut": features})
        payload = encode({"knowledge": knowledge}, name)  # type: ignore[arg-type]
        (slot,) = [slot for slot in payload.slots if slot.path == "knowledge/features/cut"]
        (result,) = decode(payload).values()
        assert isinstance(result, SampleKnowledge)
        decided = (result.features["cut"].reshape(len(labels), -1) @ head).argmax(1)
        agree[name] = float(np.mean(decided == (features.reshape(len(labels), -1) @ head).argmax(1)))
        sent = [
            chunk
            for chunk in chunks(payload.source, payload.slots, 0, ZSTD)
            if slot_at(payload.slots, chunk.offset) == slot
        ]
        sizes[name] = (slot.nbytes, sum(len(item.data) for item in sent))
    assert sizes["float32"][0] == 2 * sizes["float16"][0] == 4 * sizes["uint8"][0] == 4 * features.size
    assert all(as_sent < as_it_is for as_it_is, as_sent in sizes.values())
    assert sizes["float32"][0] > 5 * sizes["uint8"][1]
    assert agree["float16"] == 1
    assert agree["uint8"] > 0.998
