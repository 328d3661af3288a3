"""Every bad value is refused with a code and a sentence that names its tensor and row."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from intake.taken_in import FLOAT32, refusal, said, take_in
from support.wire_samples import (
    CUT_SHAPE,
    EXPECTS,
    cut_at,
    data_of,
    f32,
    i32,
    i64,
    in_pieces,
    make_contract,
    make_knowledge,
    make_payload,
)

from fleetdistill import knowledge as k
from fleetdistill.errors import RefusedError
from fleetdistill.wire.codec import encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import CHUNK_BYTES
from fleetdistill.wire.v1 import tensor_pb2
from fleetdistill_server.intake.ingest import ROOM, Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs

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
        "duplicate sample id 5 at row 1 of knowledge/sample_ids",
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
    assert str(error) == "device d1: duplicate sample id 20 at row 3 of knowledge/sample_ids"


@given(st.data())
def test_nan_in_middle_is_found_at_its_row_for_any_chunk_size(data: st.DataObject) -> None:
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


def test_nan_in_late_chunk_stops_upload_before_next_chunk() -> None:
    """A chunk boundary falls within a row and within an element; the element counts once it is whole."""
    features = np.zeros((10, *CUT_SHAPE), FLOAT32)
    features[6, 0, 0] = np.inf  # bytes 96 to 99 of the tensor
    payload = make_payload(10, features={"cut": features})
    start = payload.slots[1].start
    ingest = Ingest("d1", payload.header(), make_contract(), EXPECTS)
    staging = MemoryBlobs().stage("key", payload.parts)
    ingest.start(staging)
    parts = list(cut_at(data_of(payload), {start, start + 98, start + 101}))
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
            "importance-weighted predictions sum to 1.25 at row 1 of x/values, expected at most 1.0001",
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


# --- metrics and plans, which have no tensors


SHARE, VALUE = "must be 0 to 1 per row", "must be -1e+40 to 1e+40 per row"


def _metric(**changes: Any) -> k.Metric:
    return replace(k.Metric(name="accuracy", split="test", sum=1.0, count=2), **changes)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (_metric(sum=float("nan")), f"metric 'accuracy' has the sum nan of 2 rows, {SHARE}"),
        (_metric(sum=float("inf")), f"metric 'accuracy' has the sum inf of 2 rows, {SHARE}"),
        (_metric(sum=2.001), f"metric 'accuracy' has the sum 2.001 of 2 rows, {SHARE}"),
        (_metric(sum=-0.001), f"metric 'accuracy' has the sum -0.001 of 2 rows, {SHARE}"),
        (_metric(count=0), f"metric 'accuracy' has the sum 1 of 0 rows, {SHARE}"),
        (_metric(name="personal/accuracy", sum=3), f"metric 'personal/accuracy' has the sum 3 of 2 rows, {SHARE}"),
        (_metric(name="replaced", split="validation", sum=3), f"metric 'replaced' has the sum 3 of 2 rows, {SHARE}"),
        (_metric(name="loss", sum=2.1e40), f"metric 'loss' has the sum 2.1e+40 of 2 rows, {VALUE}"),
        (_metric(name="loss", sum=-1e300), f"metric 'loss' has the sum -1e+300 of 2 rows, {VALUE}"),
        (
            _metric(by_class=[k.ClassCount(label=0, sum=float("nan"), count=1)]),
            f"metric 'accuracy' has the sum nan of 1 rows, {SHARE}",
        ),
        (
            _metric(by_class=[k.ClassCount(label=0, sum=2.0, count=1)]),
            f"metric 'accuracy' has the sum 2 of 1 rows, {SHARE}",
        ),
        (
            _metric(by_class=[k.ClassCount(label=3, sum=1.0, count=1)]),
            "metric 'accuracy' has a duplicate or unknown class",
        ),
        (_metric(name=""), "metric '' must have a name of 1 to 64 characters"),
        (_metric(name="n" * 65), f"metric '{'n' * 64}' must have a name of 1 to 64 characters"),
        (_metric(split="n" * 65), "metric 'accuracy' must have a name of 1 to 64 characters"),
        (_metric(name="a\u202eb"), r"metric 'a\u202eb' has an invisible character in its name or split"),
        (_metric(split="\x1b"), "metric 'accuracy' has an invisible character in its name or split"),
        (_metric(count=2**63), "metric 'accuracy' has the count 9223372036854775808, must be below 2**63"),
    ],
)
def test_metrics_outside_their_ranges_are_refused(metric: k.Metric, sentence: str) -> None:
    error = refusal(encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=[metric])}))
    assert said(error) == (Code.BAD_VALUE, f"device d1: {sentence}")


@pytest.mark.parametrize(
    "metric",
    [
        _metric(sum=0.0),
        _metric(sum=2.0),
        _metric(name="loss", split="validation", sum=58.0),
        _metric(name="personal/loss", split="validation", sum=58.0),
        _metric(sum=0.0, count=0),
        _metric(name="loss", sum=2e40),
        _metric(name="loss", sum=-2e40),
        _metric(name="own/figure", sum=7.5, count=1),
    ],
)
def test_metrics_at_the_ends_of_their_ranges_are_accepted(metric: k.Metric) -> None:
    take_in(encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=[metric])}))


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
    (slot,) = [slot for slot in ingest.slots if slot.path == "knowledge/sample_ids"]
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
    assert said(error) == (Code.BAD_MESSAGE, "device d1: part 'x' has a duplicate setting or a setting without a value")
