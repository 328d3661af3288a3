"""The codec: what goes in comes out, to the bit, whatever its kind, type, shape or cut into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.wire_samples import (
    EXPECTS,
    cut_at,
    data_of,
    f32,
    make_contract,
    make_knowledge,
    make_payload,
    raw_payload,
)
from wire.one_of_each import FLOAT32, MODEL, ONE_OF_EACH

from fleetdistill import knowledge as k
from fleetdistill.errors import KnowledgeError, WireError
from fleetdistill.knowledge import KINDS
from fleetdistill.wire.codec import ArraySource, Payload, decode, encode
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import (
    CHUNK_BYTES,
    DTYPES,
    JOINED_BYTES,
    MAX_AXES,
    MAX_NAME,
    MAX_TENSORS,
    array_of,
    chunks,
    data_bytes,
    pieces,
    slots,
)
from fleetdistill.wire.v1 import knowledge_pb2, tensor_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type, and arrays in element type, shape and every bit."""
    assert type(found) is type(expected) or isinstance(expected, Mapping | np.ndarray)
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for name, item in expected.items():
            assert_same(found[name], item)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def over_the_wire(payload: Payload) -> Payload:
    """The payload as another machine sees it: parts parsed from their bytes, data from its own buffer."""
    parts = knowledge_pb2.Parts.FromString(payload.parts.SerializeToString())
    copy = data_of(payload)
    result = slots(parts)
    assert copy == b"".join(pieces(payload.source, 0, payload.data_bytes))
    buffers = [np.frombuffer(copy, np.uint8, s.nbytes, s.start) for s in result]
    return dataclasses.replace(payload, parts=parts, slots=result, source=type(payload.source)(result, buffers))  # type: ignore[call-arg]


# --- round trips


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_comes_back_as_it_was(name: str) -> None:
    result = decode(over_the_wire(encode({"first": ONE_OF_EACH[name]})))
    assert_same(result, {"first": ONE_OF_EACH[name]})


def test_parts_keep_their_names_and_their_order() -> None:
    parts = {f"part {name}": kind for name, kind in reversed(ONE_OF_EACH.items())}
    assert_same(decode(over_the_wire(encode(parts))), parts)


WIRE_DTYPES = st.sampled_from(list(DTYPES.values()))
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), hnp.arrays(WIRE_DTYPES, SHAPES), max_size=4
)


@given(ARRAYS)
def test_arrays_of_every_type_and_shape_come_back_to_the_bit(arrays: dict[str, k.Array]) -> None:
    payload = over_the_wire(raw_payload(arrays))
    result = {slot.path: array_of(slot, payload.source) for slot in payload.slots}
    assert_same(result, {f"raw/buffers/{name}": array for name, array in arrays.items()})
    assert data_bytes(payload.parts) == sum(array.nbytes for array in arrays.values())


@given(hnp.arrays(np.dtype("<f2"), SHAPES))
def test_knowledge_in_float16_comes_back_to_the_bit(values: k.Array) -> None:
    sent = k.RefinedKnowledge(valid=True, values=values)
    (result,) = decode(encode({"x": sent}, np.float16)).values()
    assert_same(result, sent)


def test_decoded_arrays_are_read_only() -> None:
    (result,) = decode(make_payload()).values()
    assert isinstance(result, k.SampleKnowledge)
    with pytest.raises(ValueError, match="read-only"):
        result.sample_ids[0] = 1


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::-1], lambda a: a.astype(">f4")])
def test_the_memory_layout_of_an_array_does_not_matter(make: Any) -> None:
    array = np.arange(6, dtype=FLOAT32).reshape(2, 3)
    (result,) = decode(encode({"m": k.ModelParameters(parameters={"w": make(array)})})).values()
    assert_same(result, k.ModelParameters(parameters={"w": make(array).astype("<f4", order="C")}))


@given(sizes=st.lists(st.integers(0, 4), max_size=6), start=st.integers(0, 90), size=st.integers(0, 90))
def test_a_view_of_arrays_has_the_bytes_that_are_read(sizes: list[int], start: int, size: int) -> None:
    """Whether the bytes are in one array, in several, or partly beyond the last one; some arrays are empty."""
    arrays = {f"a{number}": np.arange(count, dtype=np.float32) + number for number, count in enumerate(sizes)}
    source = raw_payload(arrays).source
    assert isinstance(source, ArraySource)
    assert bytes(source.view(start, size)) == source.read(start, size)


def test_only_knowledge_travels_in_the_knowledge_type() -> None:
    parts: dict[str, k.Kind] = {
        "model": MODEL,
        "knowledge": make_knowledge(2, labels=None),
        "teacher": ONE_OF_EACH["refined_knowledge"],
    }
    types = {slot.path: slot.dtype.name for slot in encode(parts, np.float16).slots}
    assert types == {
        "model/parameters/conv.weight": "float32",
        "model/parameters/bias": "float32",
        "model/buffers/count": "int64",
        "model/buffers/mean": "float32",
        "knowledge/sample_ids": "int64",
        "knowledge/features/cut": "float16",
        "knowledge/logits": "float16",
        "teacher/sample_ids": "int64",
        "teacher/values": "float16",
    }


@pytest.mark.parametrize("knowledge_type", [np.float32, np.float16, np.uint8])
def test_statistics_of_one_exchange_travel_in_types_of_their_own(knowledge_type: type) -> None:
    """Whatever the run's knowledge type is, and in whatever type they were computed."""
    space = ONE_OF_EACH["class_space"]
    wide = {name: getattr(space, name).astype(np.float64) for name in ("directions", "origin", "centres")}
    moments = dataclasses.replace(ONE_OF_EACH["shared_statistics"], variances=np.zeros(4))  # type: ignore[type-var]
    parts = {"moments": moments, "space": dataclasses.replace(space, **wide), "file": ONE_OF_EACH["network_file"]}  # type: ignore[type-var]
    types = {slot.path: slot.dtype.name for slot in encode(parts, knowledge_type).slots}
    assert types == {
        "moments/counts": "int32",
        "moments/means": "float16",
        "moments/directions": "int8",
        "moments/steps": "float16",
        "moments/variances": "float16",
        "moments/df": "int32",
        "space/counts": "int32",
        "space/directions": "float16",
        "space/origin": "float16",
        "space/centres": "float16",
        "space/df": "int64",
        "space/shrinkage": "float64",
        "space/outside": "float64",
        "file/onnx": "uint8",
    }


@pytest.mark.parametrize("number", [0.1, 5e-324, np.nextafter(1.0, 0.0), 1e300])
def test_scalars_of_a_class_space_are_exact_in_float64(number: float) -> None:
    """float16 would make 0.1 of it 0.09998, and infinity of 1e300."""
    sent = dataclasses.replace(ONE_OF_EACH["class_space"], shrinkage=np.array(number), outside=np.array(number))  # type: ignore[type-var]
    (result,) = decode(over_the_wire(encode({"x": sent}, np.float16))).values()
    assert isinstance(result, k.ClassSpace)
    assert [result.shrinkage.dtype, result.shrinkage.shape] == [np.dtype("<f8"), ()]
    assert (float(result.shrinkage), float(result.outside)) == (number, number)


@pytest.mark.parametrize("exact", [np.array(0.25, np.float32), 0.25])
def test_scalars_of_a_class_space_are_float64_whatever_they_were(exact: Any) -> None:
    sent = dataclasses.replace(ONE_OF_EACH["class_space"], shrinkage=exact)  # type: ignore[type-var]
    types = {slot.path: slot.dtype.name for slot in encode({"x": sent}).slots}
    assert types["x/shrinkage"] == "float64"


def test_every_int8_and_a_scalar_beyond_32_bits_come_back() -> None:
    every = np.arange(-128, 128).astype(np.int8)[None]
    moments = dataclasses.replace(ONE_OF_EACH["shared_statistics"], directions=every)  # type: ignore[type-var]
    space = dataclasses.replace(ONE_OF_EACH["class_space"], df=np.array(2**62 + 1, np.int64))  # type: ignore[type-var]
    result = decode(over_the_wire(encode({"moments": moments, "space": space})))
    assert_same(result, {"moments": moments, "space": space})


def test_float64_parameters_travel_as_the_nearest_float32() -> None:
    (result,) = decode(encode({"m": k.ModelParameters(parameters={"w": np.array([0.1])})})).values()
    assert_same(result, k.ModelParameters(parameters={"w": f32([0.1])}))


# --- absent is explicit


@pytest.mark.parametrize(
    "sent",
    [
        k.SampleKnowledge(sample_ids=np.arange(2)),
        k.RefinedKnowledge(valid=False),
        k.ProxyKnowledge(valid=False),
        k.SampleKnowledge(sample_ids=np.zeros(0, np.int64), logits=np.zeros((0, 3), FLOAT32)),
    ],
)
def test_what_is_absent_stays_absent_and_is_told_from_empty(sent: k.Kind) -> None:
    assert_same(decode(over_the_wire(encode({"x": sent}))), {"x": sent})


def test_false_and_zero_are_not_absent() -> None:
    sent = k.Plan(values={"flag": False, "count": 0, "rate": 0.0, "text": "", "list": []})
    (result,) = decode(over_the_wire(encode({"x": sent}))).values()
    assert_same(result, sent)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.lists(st.integers(-(2**63), 2**63 - 1)),
    )
)
def test_settings_of_a_plan_keep_value_and_type(values: dict[str, k.PlanValue]) -> None:
    (result,) = decode(over_the_wire(encode({"plan": k.Plan(values=values)}))).values()
    assert_same(result, k.Plan(values=values))


def test_a_plan_entry_without_a_value_is_refused() -> None:
    payload = encode({"plan": k.Plan(values={"cut": 1})})
    payload.parts.parts[0].plan.entries[0].ClearField("value")
    with pytest.raises(WireError, match="plan entry 'cut' has no value"):
        decode(payload)


# --- what cannot travel


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_overflows_float16_names_path_and_row(sign: int) -> None:
    features = np.zeros((5, 2, 2), FLOAT32)
    features[3, 1, 0] = sign * 70000
    with pytest.raises(KnowledgeError) as error:
        encode({"knowledge": make_knowledge(5, features={"cut": features})}, np.float16)
    assert str(error.value) == (
        f"knowledge/features/cut, row 3: {sign * 70000} does not fit float16 (largest 65504 for float16 and uint8); "
        "use float32 for this run or scale the features down"
    )


def test_largest_float16_fits_and_infinity_is_left_to_server() -> None:
    values = f32([[65504, np.inf, np.nan]])
    (result,) = decode(encode({"x": k.RefinedKnowledge(valid=True, values=values)}, np.float16)).values()
    assert isinstance(result, k.RefinedKnowledge)
    np.testing.assert_array_equal(result.values, values)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (k.ModelParameters(parameters={"w": np.ones(2, np.complex64)}), "x/parameters/w: elements of type complex64"),
        (k.ModelParameters(parameters={"w": np.array(["a"])}), "x/parameters/w: elements of type <U1 cannot be sent"),
        (k.Plan(values={"big": 2**63}), r"x/big: 9223372036854775808 does not fit its field"),
        (k.Plan(values={"none": None}), "x/none: None does not fit its field"),  # type: ignore[dict-item]
        (k.Plan(values={"list": [0.5]}), r"x/list: \[0.5\] does not fit its field"),  # type: ignore[list-item]
        (k.DistillationGradient(gradients={}, batch_size=-1, loss=0.0), "x/batch_size: -1 does not fit its field"),
    ],
)
def test_what_no_field_can_hold_is_a_wire_error_that_says_where(kind: k.Kind, message: str) -> None:
    with pytest.raises(WireError, match=message):
        encode({"x": kind})


# --- chunks


@given(st.data())
def test_any_cut_into_chunks_gives_the_same_blob(data: st.DataObject) -> None:
    payload = encode({"knowledge": make_knowledge(5)}, np.float16)
    whole = data_of(payload)
    places = data.draw(st.sets(st.integers(0, len(whole)), max_size=12))
    blobs = MemoryBlobs()
    staging = blobs.stage("key", payload.parts)
    contract = make_contract(knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT16)
    ingest = Ingest("d1", payload.header(), contract, EXPECTS)
    assert ingest.start(staging) == 0
    for chunk in cut_at(whole, places):
        ingest.feed(chunk)
    ingest.finish()
    staging.commit(payload.sha256)
    stored = blobs.open(payload.sha256)
    assert data_of(stored) == whole
    assert_same(decode(stored), decode(payload))


@given(
    st.lists(st.sampled_from([0, 1, 3, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5]), max_size=4),
    st.floats(0, 1),
)
def test_chunks_from_any_byte_on_are_the_rest_of_the_data(sizes: list[int], share: float) -> None:
    payload = raw_payload({str(n): np.full(size, n + 1, np.uint8) for n, size in enumerate(sizes)})
    first = int(share * payload.data_bytes)
    result = list(chunks(payload.source, payload.slots, first))
    assert b"".join(chunk.data for chunk in result) == data_of(payload)[first:]
    place = first
    for chunk in result:
        assert chunk.offset == place
        assert 1 <= len(chunk.data) <= CHUNK_BYTES
        covers = [slot for slot in payload.slots if slot.start < place + len(chunk.data) and place < slot.stop]
        assert len(covers) == 1 or len(chunk.data) <= JOINED_BYTES
        assert google_crc32c.value(bytes(chunk.data)) == chunk.crc32c
        place += len(chunk.data)


def test_small_neighbours_share_a_chunk_and_large_do_not() -> None:
    sizes = {"a": 10, "b": 20, "c": JOINED_BYTES, "d": 30, "e": 40}
    payload = raw_payload({name: np.zeros(size, np.uint8) for name, size in sizes.items()})
    assert [len(chunk.data) for chunk in chunks(payload.source, payload.slots)] == [30, JOINED_BYTES, 70]
    both = encode({"x": make_knowledge(2), "y": k.ModelParameters(parameters={"w": np.zeros(3, FLOAT32)})})
    kinds = [
        {slot.kind for slot in both.slots if chunk.offset <= slot.start < chunk.offset + len(chunk.data)}
        for chunk in chunks(both.source, both.slots)
    ]
    assert kinds == [{"sample_knowledge"}, {"model_parameters"}]


# --- digest


@given(st.data())
def test_the_digest_changes_with_every_bit_of_the_data(data: st.DataObject) -> None:
    payload = make_payload(2)
    whole = bytearray(data_of(payload))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    assert digest(payload.parts, iter([bytes(whole)])) == payload.sha256
    whole[bit // 8] ^= 1 << bit % 8
    assert digest(payload.parts, iter([bytes(whole)])) != payload.sha256


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "knowledge"))
def test_the_digest_changes_with_the_name_of_a_part(name: str) -> None:
    assert encode({name: make_knowledge()}).sha256 != make_payload().sha256


def test_the_digest_changes_with_shape_type_and_kind() -> None:
    zeros = np.zeros(4, np.int32)
    digests = {
        raw_payload({"x": array}).sha256
        for array in (zeros, zeros.reshape(2, 2), zeros.view(FLOAT32), zeros.view(np.int64), zeros.reshape(4, 1))
    }
    assert len(digests) == 5


def test_equal_parts_have_equal_digests_however_data_are_cut() -> None:
    payload = make_payload()
    cut = [chunk.data for chunk in cut_at(data_of(payload), range(0, payload.data_bytes, 3))]
    assert digest(payload.parts, iter(cut)) == payload.sha256 == make_payload().sha256


# --- parts that are refused


def _parts(*names: str, **tensor: Any) -> knowledge_pb2.Parts:
    settings = {"element_type": tensor_pb2.ELEMENT_TYPE_FLOAT32, "shape": [1], "encoding": tensor_pb2.ENCODING_RAW}
    parts = knowledge_pb2.Parts()
    model = parts.parts.add(name="model").model_parameters
    for name in names or ("w",):
        model.parameters.add(name=name, tensor=tensor_pb2.Tensor(**{**settings, **tensor}))
    return parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (_parts(element_type=0), "tensor 'model/parameters/w' has unknown element type 0"),
        (_parts(element_type=99), "tensor 'model/parameters/w' has unknown element type 99"),
        (_parts(encoding=0), "tensor 'model/parameters/w' has encoding 0, must be raw or channel steps"),
        (_parts(encoding=3), "tensor 'model/parameters/w' has encoding 3, must be raw or channel steps"),
        (_parts(data=b"\0" * 4), "tensor 'model/parameters/w' has its data in the header; send data in chunks"),
        (
            _parts(shape=[2, -1]),
            "tensor 'model/parameters/w' has shape [2, -1], axes must be >= 0, at most 16",
        ),
        (
            _parts(shape=[1] * (MAX_AXES + 1)),
            f"tensor 'model/parameters/w' has shape {[1] * (MAX_AXES + 1)}, axes must be >= 0, at most 16",
        ),
        (
            _parts(shape=[2**62, 2**62, 0]),
            f"tensor 'model/parameters/w' has shape {[2**62, 2**62, 0]}, must have at most {1 << 56} elements",
        ),
        (_parts("w", "v", "w"), "tensor 'model/parameters/w' appears twice"),
        (_parts(""), "a name is 0 characters long, must be 1 to 256: ''"),
        (_parts("n" * 257), f"a name is 257 characters long, must be 1 to 256: '{'n' * 40}'"),
        (
            knowledge_pb2.Parts(parts=[knowledge_pb2.Part(name="x")]),
            "part 'x' has a kind that this version does not know",
        ),
        (
            knowledge_pb2.Parts(parts=[knowledge_pb2.Part(plan=knowledge_pb2.Plan())]),
            "a name is 0 characters long, must be 1 to 256: ''",
        ),
    ],
)
def test_parts_that_break_protocol_are_refused_with_message(parts: knowledge_pb2.Parts, message: str) -> None:
    with pytest.raises(WireError) as error:
        slots(parts)
    assert str(error.value) == message


def test_two_parts_of_one_name_have_doubled_tensors() -> None:
    parts = _parts()
    parts.parts.add().CopyFrom(parts.parts[0])
    with pytest.raises(WireError, match="tensor 'model/parameters/w' appears twice"):
        slots(parts)


def test_the_longest_name_and_the_most_axes_are_taken() -> None:
    (slot,) = slots(_parts("n" * MAX_NAME, shape=[1] * MAX_AXES))
    assert (slot.shape, slot.nbytes) == ((1,) * MAX_AXES, 4)


def test_too_many_tensors_are_refused() -> None:
    names = [str(number) for number in range(MAX_TENSORS)]
    assert len(slots(_parts(*names))) == MAX_TENSORS
    with pytest.raises(WireError, match=f"the payload has more than {MAX_TENSORS} tensors"):
        slots(_parts(*names, "one more"))


def test_a_shape_that_is_taken_can_be_made_into_an_array() -> None:
    """An answer that passed ingest must never fail in the engine."""
    (slot,) = slots(_parts(shape=[2**40, 0, 2**16]))
    assert array_of(slot, raw_payload({"x": np.zeros(1)}).source).shape == (2**40, 0, 2**16)
