"""Everything from a device is hostile: each bad upload is refused with a code and a sentence that says where."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_samples import (
    CUT_SHAPE,
    EXPECTS,
    cut_at,
    data_of,
    f32,
    i32,
    i64,
    in_pieces,
    make_chunk,
    make_contract,
    make_knowledge,
    make_metrics,
    make_payload,
    raw_payload,
)

from fleetdistill import knowledge as k
from fleetdistill.errors import RefusedError
from fleetdistill.knowledge.reports import MOST_METRICS
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import CHUNK_BYTES, ELEMENT_TYPES, digest, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, tensor_pb2
from fleetdistill_server.intake.duplicate_ids import ROOM
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs

FLOAT32 = np.float32


def take_in(
    payload: Payload,
    *,
    contract: contract_pb2.Contract | None = None,
    expects: dict[str, str] | None = None,
    header: knowledge_pb2.PayloadHeader | None = None,
    chunks: Iterable[knowledge_pb2.TensorChunk] | None = None,
    samples: int | None = None,
) -> Ingest:
    """Sends a payload of device d1 through the checks, whole."""
    header = header or payload.header()
    ingest = Ingest("d1", header, declaring(contract or make_contract(), header), expects or EXPECTS, samples)
    ingest.start(MemoryBlobs().stage("key", header.parts))
    for chunk in in_pieces(payload, CHUNK_BYTES) if chunks is None else chunks:
        ingest.feed(chunk)
    ingest.finish()
    return ingest


def declaring(contract: contract_pb2.Contract, header: knowledge_pb2.PayloadHeader) -> contract_pb2.Contract:
    """The contract, with every tensor of the header's parameter-like parts declared as it is."""
    declared = contract_pb2.Contract.FromString(contract.SerializeToString())
    for part in header.parts.parts:
        if part.WhichOneof("kind") in ("model_parameters", "distillation_gradient", "generator", "discriminator"):
            shapes = declared.uploads.add(part=part.name)
            for slot in slots(knowledge_pb2.Parts(parts=[part])):
                shapes.tensors.add(name=slot.path.removeprefix(f"{part.name}/"), shape=slot.shape)
    return declared


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


def refusal(payload: Payload, **how: Any) -> RefusedError:
    """The refusal that a payload gets."""
    with pytest.raises(RefusedError) as error:
        take_in(payload, **how)
    assert error.value.details["device"] == "d1"
    return error.value


def said(error: RefusedError) -> tuple[str, str]:
    """Code and sentence."""
    return error.code, str(error)


def test_a_good_upload_is_taken() -> None:
    take_in(make_payload())
    take_in(encode({"knowledge": make_knowledge(), "metrics": make_metrics()}))
    take_in(make_payload(1))


# --- values


BAD_VALUES: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "NaN in features": (
        {"features": {"cut": f32([[[0, 0], [0, 0]], [[0, 0], [np.nan, 0]]])}},
        "non-finite features at row 1 of knowledge/features/cut",
        "knowledge/features/cut",
        1,
    ),
    "infinity in logits": (
        {"logits": f32([[0, 0, 0], [0, -np.inf, 0]])},
        "non-finite logits at row 1 of knowledge/logits",
        "knowledge/logits",
        1,
    ),
    "label too large": (
        {"labels": i32([2, 3])},
        "label 3 outside [0, 3) at row 1 of knowledge/labels",
        "knowledge/labels",
        1,
    ),
    "label negative": (
        {"labels": i32([-1, 0])},
        "label -1 outside [0, 3) at row 0 of knowledge/labels",
        "knowledge/labels",
        0,
    ),
    "sample id negative": (
        {"sample_ids": i64([0, -7])},
        "sample id -7 below 0 at row 1 of knowledge/sample_ids",
        "knowledge/sample_ids",
        1,
    ),
    "sample id twice": (
        {"sample_ids": i64([5, 5])},
        "sample id 5 appears twice, again at row 1 of knowledge/sample_ids",
        "knowledge/sample_ids",
        1,
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_refused_with_its_tensor_and_row(name: str) -> None:
    changes, sentence, tensor, row = BAD_VALUES[name]
    error = refusal(make_payload(2, **changes))
    assert said(error) == (Code.BAD_VALUE, f"device d1: {sentence}")
    assert error.details == {"device": "d1", "tensor": tensor, "row": str(row)}


def test_the_row_of_a_doubled_id_is_where_it_appears_again() -> None:
    ids = i64([30, 20, 10, 20, 0])
    error = refusal(make_payload(5, sample_ids=ids))
    assert str(error) == "device d1: sample id 20 appears twice, again at row 3 of knowledge/sample_ids"


@given(st.data())
def test_a_nan_in_the_middle_is_found_at_its_row_however_the_data_are_cut(data: st.DataObject) -> None:
    wire_type = data.draw(st.sampled_from(["float16", "float32"]))
    rows = data.draw(st.integers(1, 40))
    bad = data.draw(st.integers(0, rows * 4 - 1))
    size = data.draw(st.integers(1, 200))  # often no multiple of a row, nor of an element
    features = np.zeros((rows, *CUT_SHAPE), FLOAT32)
    features.reshape(-1)[bad] = np.nan
    payload = encode({"knowledge": make_knowledge(rows, features={"cut": features})}, np.dtype(wire_type))
    contract = make_contract(knowledge_type=getattr(tensor_pb2, f"ELEMENT_TYPE_{wire_type.upper()}"))
    error = refusal(payload, contract=contract, chunks=in_pieces(payload, size))
    assert said(error) == (
        Code.BAD_VALUE,
        f"device d1: non-finite features at row {bad // 4} of knowledge/features/cut",
    )


def test_a_nan_in_a_late_chunk_stops_the_upload_before_the_next_chunk() -> None:
    """A chunk boundary falls within a row and within an element; the element counts once it is whole."""
    features = np.zeros((10, *CUT_SHAPE), FLOAT32)
    features[6, 0, 0] = np.inf  # bytes 96 to 99 of the tensor
    payload = make_payload(10, features={"cut": features})
    start = payload.slots[1].start
    ingest = Ingest("d1", payload.header(), make_contract(), EXPECTS)
    staging = MemoryBlobs().stage("key", payload.parts)
    ingest.start(staging)
    parts = list(cut_at(data_of(payload), payload.slots, {start + 98, start + 101}))
    for chunk in parts[:2]:  # the ids, and the features up to the middle of the bad element
        ingest.feed(chunk)
    with pytest.raises(RefusedError, match="device d1: non-finite features at row 6 of knowledge/features/cut"):
        ingest.feed(parts[2])
    assert staging.length == start + 98  # the bad chunk was not kept


@pytest.mark.parametrize(
    ("kind", "expects", "sentence"),
    [
        (
            k.ModelParameters(parameters={"w": f32([0, np.nan])}),
            "model_parameters",
            "non-finite value at row 1 of x/parameters/w",
        ),
        (
            k.ModelParameters(parameters={}, buffers={"bn.running_var": f32([0, 2, -1])}),
            "model_parameters",
            "running variance -1 below 0 at row 2 of x/buffers/bn.running_var",
        ),
        (
            k.ModelParameters(parameters={}, buffers={"mean": f32(np.inf)}),
            "model_parameters",
            "non-finite value at row 0 of x/buffers/mean",
        ),
        (
            k.DistillationGradient(gradients={"w": f32([[0], [-np.inf]])}, batch_size=1, loss=0.0),
            "distillation_gradient",
            "non-finite gradient at row 1 of x/gradients/w",
        ),
        (
            k.WeightedPredictions(noise_seed=1, values=f32([[1, 0, 0], [0, -0.5, 0]])),
            "weighted_predictions",
            "importance-weighted predictions -0.5 below 0 at row 1 of x/values",
        ),
        (
            k.WeightedPredictions(noise_seed=1, values=np.float32([[1, 0, 0], [0.5, 0.5, 0.25]])),  # type: ignore[arg-type]
            "weighted_predictions",
            "importance-weighted predictions sum to 1.25 at row 1 of x/values, at most 1.0001 is possible",
        ),
        (
            k.Generator(parameters=k.ModelParameters(parameters={"w": f32([np.nan])}), noise_size=3),
            "generator",
            "non-finite value at row 0 of x/parameters/parameters/w",
        ),
    ],
)
def test_bad_values_of_other_kinds_are_refused_too(kind: k.Kind, expects: str, sentence: str) -> None:
    error = refusal(encode({"x": kind}), expects={"x": expects})
    assert said(error) == (Code.BAD_VALUE, f"device d1: {sentence}")


# --- class statistics, whose classes, counts and directions must agree


def make_statistics(**changes: Any) -> k.ClassStatistics:
    """Of two classes with 9 and 6 samples, in features of 4 numbers and with rank 3: what `of_statistics` declares."""
    directions = np.ones((2, 3, 4), FLOAT32)
    directions[1, 2] = 0  # of 6 samples there are no more than 2
    columns: dict[str, Any] = {
        "labels": [2, 0],
        "counts": i32([9, 6]),
        "means": np.full((2, 4), -1, FLOAT32),
        "directions": directions,
        "variances": np.zeros((2, 4), FLOAT32),
    }
    return k.ClassStatistics(**{**columns, **changes})


def of_statistics(rank: int = 3) -> contract_pb2.Contract:
    shapes = {"means": [4], "variances": [4], **({"directions": [rank, 4]} if rank else {})}
    tensors = [contract_pb2.NamedShape(name=name, shape=shape) for name, shape in shapes.items()]
    return make_contract(uploads=[contract_pb2.PartShapes(part="x", tensors=tensors, least_samples=5)])


def statistics_refusal(sent: k.ClassStatistics, samples: int | None = None, rank: int = 3) -> tuple[str, str]:
    payload = encode({"x": sent})
    with pytest.raises(RefusedError) as error:
        take_in(payload, contract=of_statistics(rank), expects={"x": "class_statistics"}, samples=samples)
    return said(error.value)


def test_class_statistics_are_taken_of_some_classes_of_none_and_without_directions() -> None:
    expects = {"x": "class_statistics"}
    take_in(encode({"x": make_statistics()}), contract=of_statistics(), expects=expects, samples=15)
    take_in(encode({"x": k.ClassStatistics(labels=[])}), contract=of_statistics(), expects=expects, samples=15)
    diagonal = make_statistics(directions=None)
    take_in(encode({"x": diagonal}), contract=of_statistics(rank=0), expects=expects)
    half = of_statistics()
    half.knowledge_type = tensor_pb2.ELEMENT_TYPE_FLOAT16
    take_in(encode({"x": make_statistics()}, np.float16), contract=half, expects=expects)


def _with(name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    array = np.array(getattr(make_statistics(), name))
    array[at] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"labels": [3, 0]}, Code.BAD_VALUE, "part 'x' has class 3 outside [0, 3)"),
        ({"labels": [2**32 - 1, 0]}, Code.BAD_VALUE, "part 'x' has class 4294967295 outside [0, 3)"),
        ({"labels": [2, 2]}, Code.BAD_VALUE, "part 'x' has a class twice"),
        ({"labels": [2, 1, 0]}, Code.BAD_TENSOR, "x/counts has shape [2], expected [3]"),
        ({"labels": []}, Code.BAD_TENSOR, "tensor 'x/counts' is not part of the contract"),
        ({"counts": i32([9, 4])}, Code.BAD_VALUE, "count 4 below 5 at row 1 of x/counts"),
        ({"counts": i32([-9, 6])}, Code.BAD_VALUE, "count -9 below 5 at row 0 of x/counts"),
        ({"counts": i32([10, 6])}, Code.BAD_VALUE, "x/counts sum to 16, the device has declared 15 samples"),
        (
            {"counts": i32([2**31 - 1, 2**31 - 1])},
            Code.BAD_VALUE,
            "x/counts sum to 4294967294, the device has declared 15 samples",
        ),
        ({"counts": i64([9, 6])}, Code.BAD_TENSOR, "x/counts is int64, expected int32"),
        (_with("variances", (1, 3), -1e-3), Code.BAD_VALUE, "variance -0.001 below 0 at row 1 of x/variances"),
        (_with("variances", (0, 3), np.inf), Code.BAD_VALUE, "non-finite variance at row 0 of x/variances"),
        (_with("means", (1, 0), np.nan), Code.BAD_VALUE, "non-finite means at row 1 of x/means"),
        (_with("directions", (0, 0, 0), -np.inf), Code.BAD_VALUE, "non-finite directions at row 0 of x/directions"),
        (
            {"directions": np.zeros((2, 4, 4), FLOAT32)},
            Code.BAD_TENSOR,
            "x/directions has shape [2, 4, 4], expected [2, 3, 4]",
        ),
        (
            _with("directions", (1, 2, 3), 1e-6),
            Code.BAD_VALUE,
            "6 samples allow 2 directions, row 1 of x/directions has more",
        ),
        ({"means": None}, Code.BAD_TENSOR, "part 'x' lacks means, which feddkc needs"),
        ({"directions": None}, Code.BAD_TENSOR, "part 'x' lacks directions, which feddkc needs"),
    ],
)
def test_bad_class_statistics_are_refused(changes: dict[str, Any], code: Code, sentence: str) -> None:
    assert statistics_refusal(make_statistics(**changes), samples=15) == (code, f"device d1: {sentence}")


def test_directions_are_refused_where_the_contract_has_none() -> None:
    assert statistics_refusal(make_statistics(), rank=0) == (
        Code.BAD_TENSOR,
        "device d1: tensor 'x/directions' is not part of the contract",
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([[1, 0, 0], [0, -0.5, 0]], "soft predictions -0.5 below 0 at row 1 of x/values"),
        ([[1, 0.5, 0]], "soft predictions sum to 1.5 at row 0 of x/values, at most 1.002 is possible"),
        ([[1, 0, 0], [0.5, 0, 0.25]], "soft predictions sum to 0.75 at row 1 of x/values, at least 0.998 is possible"),
        ([[0, 0, 0]], "soft predictions sum to 0 at row 0 of x/values, at least 0.998 is possible"),
        ([[np.nan, 0, 0]], "non-finite soft predictions at row 0 of x/values"),
    ],
)
def test_bad_soft_predictions_are_refused(values: list[list[float]], sentence: str) -> None:
    payload = encode({"x": k.SoftPredictions(noise_seed=1, values=f32(values))})
    error = refusal(payload, expects={"x": "soft_predictions"})
    assert said(error) == (Code.BAD_VALUE, f"device d1: {sentence}")


@pytest.mark.parametrize("number", [2**-10 * (1 + 0.999 * 2**-11), 2**-10 * (1 + 1.001 * 2**-11)])
def test_soft_predictions_of_many_classes_may_be_rounded_to_float16(number: float) -> None:
    """All but one of a row are rounded the same way, down or up, as far as it goes."""
    row = np.full((1, 1000), number)
    row[0, 0] = 1 - row[0, 1:].sum()
    rounded = row.astype(np.float16)
    assert 4.5e-4 < abs(rounded.sum(dtype=np.float64) - 1) < 5.3e-4
    contract = make_contract(
        classes=[str(label) for label in range(1000)], knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT16
    )
    payload = encode({"x": k.SoftPredictions(noise_seed=1, values=rounded)}, np.float16)
    take_in(payload, contract=contract, expects={"x": "soft_predictions"})


def test_soft_predictions_without_values_are_refused() -> None:
    payload = encode({"x": k.SoftPredictions(noise_seed=1, values=np.zeros((1, 3), FLOAT32))})
    payload.parts.parts[0].soft_predictions.ClearField("values")
    header = knowledge_pb2.PayloadHeader(parts=payload.parts, sha256=b"s" * 32)
    error = refusal(payload, header=header, chunks=[], expects={"x": "soft_predictions"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'x' lacks values")


# --- metrics and plans, which have no tensors


def _metric(**changes: Any) -> k.Metric:
    return replace(k.Metric(name="accuracy", split="test", sum=1.0, count=2), **changes)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (_metric(sum=float("nan")), "metric 'accuracy' is not finite or names an unknown class"),
        (_metric(sum=float("inf")), "metric 'accuracy' is not finite or names an unknown class"),
        (
            _metric(by_class=[k.ClassCount(label=0, sum=float("nan"), count=1)]),
            "metric 'accuracy' is not finite or names an unknown class",
        ),
        (
            _metric(by_class=[k.ClassCount(label=3, sum=1.0, count=1)]),
            "metric 'accuracy' is not finite or names an unknown class",
        ),
        (_metric(name=""), "metric '': its name must be 1 to 64 characters, its count below 2**63"),
        (_metric(name="n" * 65), f"metric '{'n' * 64}': its name must be 1 to 64 characters, its count below 2**63"),
        (_metric(count=2**63), "metric 'accuracy': its name must be 1 to 64 characters, its count below 2**63"),
    ],
)
def test_bad_metrics_are_refused(metric: k.Metric, sentence: str) -> None:
    error = refusal(encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=[metric])}))
    assert said(error) == (Code.BAD_VALUE, f"device d1: {sentence}")


@pytest.mark.parametrize("bad_row", [None, 0, 2047, 2048, 2999])
def test_rows_are_summed_in_bounded_memory(bad_row: int | None) -> None:
    """12 MB of rows of 4 kB: a chunk has a whole number of them, and the last one is not full."""
    values = np.full((3000, 1024), 2.0**-11, np.float32)
    if bad_row is not None:
        values[bad_row, 5] = 0.75
    payload = encode({"x": k.WeightedPredictions(noise_seed=1, values=values)})
    contract = make_contract()
    contract.max_upload_bytes = 1 << 30
    shapes = contract.uploads.add(part="x")
    shapes.tensors.add(name="values", shape=values.shape)
    ingest = Ingest("d1", payload.header(), contract, {"x": "weighted_predictions"})
    ingest.start(MemoryBlobs().stage("key", payload.parts))
    for chunk in in_pieces(payload, CHUNK_BYTES):
        ingest.feed(chunk)
    tracemalloc.start()
    if bad_row is None:
        ingest.finish()
    else:
        with pytest.raises(
            RefusedError, match=f"predictions sum to 1.2495[0-9]* at row {bad_row} of x/values"
        ) as error:
            ingest.finish()
        assert error.value.details["row"] == str(bad_row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES


def test_ids_are_compared_in_bounded_memory() -> None:
    """24 MB of ids in no order."""
    count = 3_000_000
    payload = encode({"knowledge": k.SampleKnowledge(sample_ids=np.arange(count)[::-1].copy())})
    contract = make_contract()
    contract.max_upload_bytes = 1 << 30
    del contract.requirements.columns[:]
    ingest = Ingest("d1", payload.header(), contract, EXPECTS)
    (slot,) = [one for one in ingest.slots if one.path == "knowledge/sample_ids"]
    staging = MemoryBlobs().stage("key", payload.parts)
    staging.append(payload.source.read(0, payload.data_bytes))
    tracemalloc.start()
    ingest._check_unique(slot, staging)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * ROOM + 8 * CHUNK_BYTES


@pytest.mark.parametrize("how", ["no value", "twice"])
def test_a_plan_that_the_engine_could_not_read_is_refused(how: str) -> None:
    payload = encode({"x": k.Plan(values={"cut": 1})})
    entries = payload.parts.parts[0].plan.entries
    if how == "twice":
        entries.add().CopyFrom(entries[0])
    else:
        entries[0].ClearField("value")
    error = refusal(payload, expects={"x": "plan"})
    assert said(error) == (Code.BAD_MESSAGE, "device d1: part 'x' has a setting twice, or one without a value")


# --- parts and tensors


def _with_shape(payload: Payload, field: str, shape: list[int]) -> knowledge_pb2.PayloadHeader:
    header = payload.header()
    sent = header.parts.parts[0].sample_knowledge
    tensor = sent.features[0].tensor if field == "features" else getattr(sent, field)
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    header.data_bytes = slots(header.parts)[-1].stop
    return header


BAD_TENSORS: dict[str, tuple[Payload, str, str]] = {
    "wrong feature shape": (
        make_payload(features={"cut": np.zeros((4, 2, 3), FLOAT32)}),
        "knowledge/features/cut has shape [4, 2, 3], expected [N, 2, 2]",
        "knowledge/features/cut",
    ),
    "wrong number of classes": (
        make_payload(logits=np.zeros((4, 10), FLOAT32)),
        "knowledge/logits has shape [4, 10], expected [N, 3]",
        "knowledge/logits",
    ),
    "too few axes": (
        make_payload(logits=np.zeros(4, FLOAT32)),
        "knowledge/logits has shape [4], expected [N, 3]",
        "knowledge/logits",
    ),
    "a scalar": (
        make_payload(labels=i32(1)),
        "knowledge/labels has shape [], expected [N]",
        "knowledge/labels",
    ),
    "features in half precision": (
        encode({"knowledge": make_knowledge()}, np.float16),
        "knowledge/features/cut is float16, expected float32",
        "knowledge/features/cut",
    ),
    "labels of the wrong type": (
        make_payload(labels=np.zeros(4, np.int64)),
        "knowledge/labels is int64, expected int32",
        "knowledge/labels",
    ),
    "unknown column": (
        make_payload(features={"cut": np.zeros((4, *CUT_SHAPE), FLOAT32), "deep": np.zeros((4, 1), FLOAT32)}),
        "tensor 'knowledge/features/deep' is not part of the contract",
        "knowledge/features/deep",
    ),
    "columns that disagree": (
        make_payload(labels=np.zeros(3, np.int32)),
        "knowledge/labels has 3 rows, knowledge/sample_ids has 4; they must agree",
        "knowledge/labels",
    ),
    "no rows at all": (
        make_payload(0),
        "knowledge/sample_ids has no rows, at least 1 is needed",
        "knowledge/sample_ids",
    ),
    "labels missing": (
        make_payload(labels=None),
        "part 'knowledge' lacks labels, which feddkc needs",
        "labels",
    ),
    "everything missing": (
        encode({"knowledge": k.SampleKnowledge(sample_ids=np.arange(4))}),
        "part 'knowledge' lacks logits, labels, features/cut, which feddkc needs",
        "logits",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_the_contract_is_refused_before_any_data(name: str) -> None:
    payload, sentence, tensor = BAD_TENSORS[name]
    error = refusal(payload, chunks=[])
    assert said(error) == (Code.BAD_TENSOR, f"device d1: {sentence}")
    assert error.details["tensor"] == tensor


def test_each_feature_column_of_the_contract_must_be_there() -> None:
    two = [contract_pb2.NamedShape(name=name, shape=CUT_SHAPE) for name in ("cut", "deep")]
    error = refusal(make_payload(), contract=make_contract(features=two))
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'knowledge' lacks features/deep, which feddkc needs")


def test_sample_ids_are_always_needed() -> None:
    payload = make_payload()
    parts = knowledge_pb2.Parts()
    parts.CopyFrom(payload.parts)
    parts.parts[0].sample_knowledge.ClearField("sample_ids")
    header = knowledge_pb2.PayloadHeader(parts=parts, data_bytes=slots(parts)[-1].stop, sha256=b"s" * 32)
    error = refusal(payload, header=header, chunks=[])
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'knowledge' lacks sample_ids, which feddkc needs")


def test_predictions_without_values_are_refused() -> None:
    payload = encode({"x": k.WeightedPredictions(noise_seed=1, values=np.zeros((1, 3), FLOAT32))})
    payload.parts.parts[0].weighted_predictions.ClearField("values")
    header = knowledge_pb2.PayloadHeader(parts=payload.parts, sha256=b"s" * 32)
    error = refusal(payload, header=header, chunks=[], expects={"x": "weighted_predictions"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'x' lacks values")


def test_predictions_have_as_many_rows_as_the_contract_declares() -> None:
    declared = contract_pb2.PartShapes(part="x", tensors=[contract_pb2.NamedShape(name="values", shape=[2, 3])])
    payload = encode({"x": k.WeightedPredictions(noise_seed=1, values=np.zeros((1, 3), FLOAT32))})
    error = refusal(payload, contract=make_contract(uploads=[declared]), expects={"x": "weighted_predictions"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: x/values has shape [1, 3], expected [2, 3]")


def test_knowledge_about_another_proxy_set_is_refused() -> None:
    payload = encode({"x": k.ProxyKnowledge(valid=True, proxy_digest=b"a" * 32)})
    error = refusal(payload, contract=make_contract(proxy_digest=b"b" * 32), expects={"x": "proxy_knowledge"})
    assert said(error) == (
        Code.CONTRACT_MISMATCH,
        "device d1: part 'x' is about another proxy set than the contract's",
    )


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "the answer has parts none, asked for knowledge (sample_knowledge)"),
        (
            {"metrics": make_metrics()},
            "the answer has parts metrics (metrics), asked for knowledge (sample_knowledge), metrics (metrics)",
        ),
        (
            {"knowledge": make_knowledge(), "model": k.ModelParameters(parameters={})},
            "the answer has parts knowledge (sample_knowledge), model (model_parameters), "
            "asked for knowledge (sample_knowledge)",
        ),
        (
            {"knowledge": k.RefinedKnowledge(valid=False)},
            "the answer has parts knowledge (refined_knowledge), asked for knowledge (sample_knowledge)",
        ),
        (
            {"knowledge": make_knowledge(), "metrics": k.Plan(values={})},
            "the answer has parts knowledge (sample_knowledge), metrics (plan), "
            "asked for knowledge (sample_knowledge), metrics (metrics)",
        ),
    ],
)
def test_parts_other_than_those_asked_for_are_refused(parts: dict[str, k.Kind], sentence: str) -> None:
    assert said(refusal(encode(parts))) == (Code.BAD_MESSAGE, f"device d1: {sentence}")


def test_two_parts_of_one_name_are_refused() -> None:
    payload = encode({"x": k.Plan(values={})})
    payload.parts.parts.add().CopyFrom(payload.parts.parts[0])
    error = refusal(payload, expects={"x": "plan"})
    assert said(error) == (Code.BAD_MESSAGE, "device d1: two parts have the same name")


def test_a_part_of_a_kind_that_only_the_server_sends_is_refused_even_if_named_in_the_ask() -> None:
    payload = encode({"x": k.RefinedKnowledge(valid=True, values=np.zeros((1, 3), FLOAT32))})
    error = refusal(payload, expects={"x": "refined_knowledge"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: tensor 'x/values' is not part of the contract")


def test_every_tensor_of_a_model_has_the_type_that_the_contract_says() -> None:
    """A running mean in int64 would be the sum over the devices, as counters are, and not their mean."""
    right = k.ModelParameters(parameters={"w": f32([1])}, buffers={"running_mean": f32([1]), "counter": i64(3)})
    contract = make_contract()
    shapes = contract.uploads.add(part="x")
    for name, shape in k.Weights.of(right).tensors.items():
        shapes.tensors.add(name=name, shape=shape, element_type=ELEMENT_TYPES[shape.dtype])
    Ingest("d1", encode({"x": right}).header(), contract, {"x": "model_parameters"})
    for name, array, wanted in (
        ("running_mean", i64([1]), "float32"),
        ("counter", f32(3), "int64"),
        ("counter", np.uint8(3), "int64"),
    ):
        wrong = k.ModelParameters(parameters=right.parameters, buffers={**right.buffers, name: np.asarray(array)})
        with pytest.raises(RefusedError) as error:
            Ingest("d1", encode({"x": wrong}).header(), contract, {"x": "model_parameters"})
        text = f"device d1: x/buffers/{name} is {np.asarray(array).dtype.name}, expected {wanted}"
        assert said(error.value) == (Code.BAD_TENSOR, text)


def test_in_a_contract_of_before_only_scalar_buffers_may_count() -> None:
    good = {"w": f32([1])}
    take_in(
        encode({"x": k.ModelParameters(parameters=good, buffers={"n": i64(1), "m": f32([1])})}),
        expects={"x": "model_parameters"},
    )
    error = refusal(
        encode({"x": k.ModelParameters(parameters=good, buffers={"m": i64([1])})}), expects={"x": "model_parameters"}
    )
    assert said(error) == (Code.BAD_TENSOR, "device d1: x/buffers/m is int64, expected float32")
    error = refusal(encode({"x": k.ModelParameters(parameters={"w": i64([1])})}), expects={"x": "model_parameters"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: x/parameters/w is int64, expected float32")
    error = refusal(raw_payload({"w": np.zeros(1)}), expects={"raw": "model_parameters"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: raw/buffers/w is float64, expected float32")


@pytest.mark.parametrize("samples", [3, 4])
def test_a_device_has_no_more_rows_than_samples(samples: int) -> None:
    if samples == 4:
        take_in(make_payload(), samples=samples)
        return
    error = refusal(make_payload(), samples=samples)
    text = "device d1: knowledge/sample_ids has 4 rows, the device has declared 3 samples"
    assert said(error) == (Code.BAD_VALUE, text)
    assert error.details["check_in"] == "again"


def test_metrics_are_counted_and_each_is_there_once() -> None:
    def sent(*names: str) -> k.Metrics:
        return k.Metrics(metrics=[k.Metric(name=one, split="test", sum=1, count=1) for one in names])

    knowledge = make_knowledge()
    take_in(encode({"knowledge": knowledge, "metrics": sent(*(f"m{n}" for n in range(MOST_METRICS)))}))
    for wrong in (sent(*(f"m{n}" for n in range(MOST_METRICS + 1))), sent("a", "a")):
        error = refusal(encode({"knowledge": knowledge, "metrics": wrong}))
        text = f"device d1: part 'metrics' has {len(wrong.metrics)} metrics, must be 100 at most and each there once"
        assert said(error) == (Code.BAD_VALUE, text)


def test_a_metric_names_a_class_once() -> None:
    twice = k.Metric(name="m", split="test", sum=1, count=1, by_class=[k.ClassCount(label=1, sum=1, count=1)] * 2)
    error = refusal(encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=[twice])}))
    assert said(error) == (Code.BAD_VALUE, "device d1: metric 'm' has a class twice")


def test_a_refusal_quotes_the_first_few_parts() -> None:
    parts = encode({f"{number}{'x' * 200}": k.Metrics(metrics=[]) for number in range(50)})
    text = str(refusal(parts))
    assert "and 45 more, asked for knowledge (sample_knowledge)" in text
    assert len(text) < 600
    too_many = encode({str(number): k.Metrics(metrics=[]) for number in range(50)})
    for number in range(51):
        too_many.parts.parts.add(name=f"p{number}").metrics.SetInParent()
    assert said(refusal(too_many)) == (Code.BAD_MESSAGE, "device d1: the payload has 101 parts, must be at most 100")


def test_settings_of_an_answer_are_bounded() -> None:
    error = refusal(encode({"x": k.Plan(values={"a": "x" * 70_000})}), expects={"x": "plan"})
    assert error.code == Code.TOO_LARGE


def test_a_malformed_header_is_refused_with_the_protocol_s_own_sentence() -> None:
    payload = make_payload()
    payload.parts.parts[0].sample_knowledge.logits.encoding = 9  # type: ignore[assignment]
    error = refusal(payload)
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: tensor 'knowledge/logits' has encoding 9, this version knows raw and channel steps",
    )


# --- sizes


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    payload = make_payload()
    size = payload.data_bytes
    take_in(payload, contract=make_contract(max_upload_bytes=size))
    error = refusal(payload, contract=make_contract(max_upload_bytes=size - 1), chunks=[])
    assert said(error) == (
        Code.TOO_LARGE,
        f"device d1: the payload is {size} bytes, the limit is {size - 1}; "
        "send fewer samples per round, half precision, or raise the limit",
    )


def test_a_tensor_of_a_trillion_elements_is_refused_without_room_for_it() -> None:
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
        f"device d1: the payload is {header.data_bytes} bytes, the limit is 1048576; "
        "send fewer samples per round, half precision, or raise the limit",
    )
    assert said(disagreeing) == (
        Code.BAD_TENSOR,
        "device d1: knowledge/features/cut has 274877906944 rows, knowledge/sample_ids has 1; they must agree",
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
        f"device d1: the header declares {size + change} data bytes, its tensors have {size}; "
        "or its digest is not 32 bytes",
    )


@pytest.mark.parametrize("sha256", [b"", b"s" * 31, b"s" * 33])
def test_a_digest_of_another_length_is_refused(sha256: bytes) -> None:
    header = make_payload().header()
    header.sha256 = sha256
    error = refusal(make_payload(), header=header, chunks=[])
    assert error.code == Code.BAD_MESSAGE
    assert str(error).endswith("or its digest is not 32 bytes")


# --- chunks


def _stream(payload: Payload) -> list[knowledge_pb2.TensorChunk]:
    return in_pieces(payload, 8)


def test_a_chunk_with_a_wrong_checksum_is_refused_and_names_its_place() -> None:
    chunks = _stream(make_payload())
    chunks[5].crc32c ^= 1
    error = refusal(make_payload(), chunks=chunks)
    assert said(error) == (
        Code.CHECKSUM,
        "device d1: a chunk of tensor 1 at byte 8 fails its CRC-32C; send it again",
    )
    assert error.details["tensor"] == "knowledge/features/cut"


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
        "device d1: the SHA-256 of parts and data is not the one in the header",
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
    error = refusal(payload, chunks=[*_stream(payload), make_chunk(3, 16, b"more")])
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: knowledge/labels was declared with 16 bytes, a chunk ends at 20",
    )


def test_a_chunk_over_the_border_of_its_tensor_is_refused() -> None:
    payload = make_payload()
    error = refusal(payload, chunks=[make_chunk(0, 0, data_of(payload)[:40])])
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: knowledge/sample_ids was declared with 32 bytes, a chunk ends at 40",
    )


@pytest.mark.parametrize("size", [0, CHUNK_BYTES + 1])
def test_chunks_that_are_empty_or_too_large_are_refused(size: int) -> None:
    payload = encode({"x": k.ModelParameters(parameters={"w": np.zeros(CHUNK_BYTES, FLOAT32)})})
    contract = make_contract(max_upload_bytes=8 * CHUNK_BYTES)
    chunks = [make_chunk(0, 0, bytes(size))]
    error = refusal(payload, contract=contract, chunks=chunks, expects={"x": "model_parameters"})
    assert said(error) == (Code.BAD_MESSAGE, f"device d1: a chunk has {size} bytes, must be 1 to 1048576")
    take_in(payload, contract=contract, expects={"x": "model_parameters"})


def test_a_chunk_for_a_tensor_that_does_not_exist_is_refused() -> None:
    error = refusal(make_payload(), chunks=[make_chunk(4, 0, b"data")])
    assert said(error) == (Code.BAD_MESSAGE, "device d1: a chunk is for tensor 4, there are 4")


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
    for chunk in cut_at(whole, payload.slots, places):
        if payload.slots[chunk.tensor].start + chunk.offset >= held:
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
    with pytest.raises(RefusedError, match=f"{size + 1} bytes are staged, the payload has {size}"):
        ingest.start(staging)
