"""The schema of a kind: its bytes and tensors are those that `encode` makes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.one_of_each import ONE_OF_EACH

from fleetdistill import knowledge as k
from fleetdistill.wire.codec import encode
from fleetdistill.wire.kind import PartSchema
from fleetdistill.wire.schema import TypedShape
from fleetdistill.wire.v1 import knowledge_pb2

N, C, D, R = 6, 3, 4, 2
MODEL = k.ModelParameters(
    parameters={"0.weight": np.zeros((3, 2), np.float32), "0.bias": np.zeros(3, np.float64)},
    buffers={"1.running_var": np.ones(2, np.float32), "1.num_batches_tracked": np.zeros((), np.int64)},
)
SIZE = k.Weights.of(MODEL)
IDS = np.arange(N, dtype=np.int64)
ROWS: dict[str, Any] = {"features": {"cut": (2, 2)}, "classes": C, "columns": ("features", "logits", "labels")}
STATISTICS: dict[str, Any] = {"features": {}, "min_samples": 1, "rows_per_direction": 2}


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


PARTS: list[tuple[k.Kind, PartSchema]] = [
    (MODEL, k.ModelParameters.schema(SIZE)),
    (k.Generator(parameters=MODEL, noise_size=3), k.Generator.schema(SIZE)),
    (k.Discriminator(parameters=MODEL, shares_extractor=False), k.Discriminator.schema(SIZE)),
    (
        k.DistillationGradient(gradients=MODEL.parameters, batch_size=1, loss=0.0),
        k.DistillationGradient.schema(SIZE),
    ),
    (
        k.SampleKnowledge(
            sample_ids=IDS, features={"cut": zeros(N, 2, 2)}, logits=zeros(N, C), labels=zeros(N, dtype=np.int32)
        ),
        k.SampleKnowledge.schema(rows=N, **ROWS),
    ),
    (
        k.SampleKnowledge(sample_ids=IDS, features={"cut": zeros(N, 5)}),
        k.SampleKnowledge.schema(rows=N, features={"cut": (5,)}),
    ),
    (
        k.RefinedKnowledge(valid=True, sample_ids=IDS, values=zeros(N, C)),
        k.RefinedKnowledge.schema(rows=N, classes=C),
    ),
    (
        k.ProxyKnowledge(valid=True, logits=zeros(N, C), embeddings=zeros(N, D)),
        k.ProxyKnowledge.schema(samples=N, classes=C, embedding=(D,), columns=("features", "logits")),
    ),
    (
        k.ProxyKnowledge(valid=True, logits=zeros(N, C)),
        k.ProxyKnowledge.schema(samples=N, classes=C, embedding=(D,), columns=("logits",)),
    ),
    (k.WeightedPredictions(noise_seed=1, values=zeros(N, C)), k.WeightedPredictions.schema(rows=N, classes=C)),
    (
        k.SharedStatistics(
            labels=[0, 1, 2],
            counts=zeros(C, dtype=np.int32),
            means=zeros(C, D),
            directions=zeros(R, D, dtype=np.int8),
            steps=zeros(R),
            variances=zeros(D),
            df=zeros(dtype=np.int32),
        ),
        k.SharedStatistics.schema(classes=C, dimensions=D, directions=R, max_rows=R, **STATISTICS),
    ),
    (
        k.SharedStatistics(
            labels=[0, 1, 2],
            counts=zeros(C, dtype=np.int32),
            means=zeros(C, D),
            variances=zeros(D),
            df=zeros(dtype=np.int32),
        ),
        k.SharedStatistics.schema(classes=C, dimensions=D, directions=0, max_rows=R, **STATISTICS),
    ),
    (
        k.LinearHead(labels=list(range(C)), counts=zeros(C, dtype=np.int32), mean=zeros(D), weights=zeros(C, D + 1)),
        k.LinearHead.schema(classes=C, dimensions=D),
    ),
    (
        k.HeadGradient(gradient=zeros(C, D + 1), scale=1.0, loss=0.0, rows=1),
        k.HeadGradient.schema(classes=C, dimensions=D),
    ),
    (
        k.ClassSums(counts=zeros(C), sums=zeros(C, D), second_moment=zeros(D * (D + 1) // 2), mu=1.0, discrete=False),
        k.ClassSums.schema(classes=C, dimensions=D, features={}),
    ),
    (
        k.SecureMessage(boxes=zeros(4, 80, dtype=np.uint8)),
        k.SecureMessage.schema("boxes", (4, 80), most=1000),
    ),
    (
        k.NamedTensors(tensors={"means": zeros(C, D), "counts": zeros(C, dtype=np.int64)}, reveals=["counts"]),
        k.NamedTensors.schema({"means": (C, D), "counts": TypedShape.of((C,), np.int64)}, reveals=["counts"]),
    ),
    (
        k.ClassSpace(
            labels=[0, 1, 2],
            counts=zeros(C, dtype=np.int32),
            directions=zeros(D, R),
            origin=zeros(R),
            centres=zeros(C, R),
            df=zeros(dtype=np.int64),
            shrinkage=zeros(dtype=np.float64),
            outside=zeros(dtype=np.float64),
        ),
        k.ClassSpace.schema(classes=C, dimensions=D, directions=R),
    ),
]


@pytest.mark.parametrize(("part", "schema"), PARTS)
@pytest.mark.parametrize("knowledge_type", ["float16", "float32", "uint8"])
def test_a_schema_has_the_tensors_and_bytes_that_travel(part: k.Kind, schema: PartSchema, knowledge_type: str) -> None:
    sent = encode({"part": part}, np.dtype(knowledge_type))
    expected = {f"part/{path}": one for path, one in schema.on_the_wire(knowledge_type).items()}
    assert {slot.path: (slot.dtype, slot.shape) for slot in sent.slots} == {
        path: (one.types[0], one.shape) for path, one in expected.items()
    }
    assert schema.nbytes(knowledge_type) == sent.data_bytes
    assert set(schema.columns) == set(part.columns())


@given(
    rows=st.integers(1, 9),
    classes=st.integers(1, 5),
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple),
    columns=st.sets(st.sampled_from(["logits", "labels"])),
    knowledge_type=st.sampled_from(["float16", "float32", "uint8"]),
)
def test_bytes_of_samples_of_any_size_are_those_that_travel(
    rows: int, classes: int, shape: tuple[int, ...], columns: set[str], knowledge_type: str
) -> None:
    part = k.SampleKnowledge(
        sample_ids=np.arange(rows),
        features={"a": zeros(rows, *shape), "b": zeros(rows, 3)},
        logits=zeros(rows, classes) if "logits" in columns else None,
        labels=zeros(rows, dtype=np.int32) if "labels" in columns else None,
    )
    held = ("features", *sorted(columns))
    schema = k.SampleKnowledge.schema(rows=rows, features={"a": shape, "b": (3,)}, classes=classes, columns=held)
    assert schema.nbytes(knowledge_type) == encode({"part": part}, np.dtype(knowledge_type)).data_bytes


def test_every_kind_with_a_schema_is_tried_here() -> None:
    assert {schema.kind for _, schema in PARTS} == {kind for kind in k.KINDS.values() if hasattr(kind, "schema")}


def test_counted_sizes_give_the_bytes_of_known_tensors() -> None:
    counted = k.Weights(SIZE.parameters, SIZE.buffer_bytes)
    for kind in (k.ModelParameters, k.Generator, k.Discriminator, k.DistillationGradient):
        assert kind.schema(counted).nbytes("float16") == kind.schema(SIZE).nbytes("float16")
    known = k.SampleKnowledge.schema(rows=N, features={"cut": (7, 2, 2)})
    rough = k.SampleKnowledge.schema(rows=N, features={"cut": (28,)}, channels={"cut": 7})
    assert known.nbytes("uint8") == rough.nbytes("uint8") == 8 * N + 28 * N + 2 * 4 * 7


def test_a_kind_has_a_message_and_a_message_has_a_kind() -> None:
    """A class and its message are all that a kind needs; each finds the other by name."""
    (fields,) = (oneof.fields for oneof in knowledge_pb2.Part.DESCRIPTOR.oneofs if oneof.name == "kind")
    assert {field.name for field in fields} == k.KINDS.keys() == ONE_OF_EACH.keys()
    assert all(get_args(k.Parts)[1] in kind.__mro__ for kind in k.KINDS.values())


def test_a_kind_that_may_leave_a_device_has_words_for_tables() -> None:
    lacking = {name for name, kind in k.KINDS.items() if kind.possible_columns is not None and not kind.description}
    assert lacking == {"metrics"}  # which are figures beside what a method sends
