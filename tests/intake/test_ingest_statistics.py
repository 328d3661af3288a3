"""Class statistics and soft predictions that cannot be are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.taken_in import FLOAT32, refusal, said, take_in
from support.wire_samples import (
    f32,
    i32,
    i64,
    make_contract,
)

from fleetdistill import knowledge as k
from fleetdistill.errors import RefusedError
from fleetdistill.wire.codec import encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, tensor_pb2


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
        ({"labels": [2, 2]}, Code.BAD_VALUE, "part 'x' has a duplicate class"),
        ({"labels": [2, 1, 0]}, Code.BAD_TENSOR, "x/counts has shape [2], expected [3]"),
        ({"labels": []}, Code.BAD_TENSOR, "tensor 'x/counts' is not part of the contract"),
        ({"counts": i32([9, 4])}, Code.BAD_VALUE, "count 4 below 5 at row 1 of x/counts"),
        ({"counts": i32([-9, 6])}, Code.BAD_VALUE, "count -9 below 5 at row 0 of x/counts"),
        ({"counts": i32([10, 6])}, Code.BAD_VALUE, "x/counts sum to 16, but the device declared 15 samples"),
        (
            {"counts": i32([2**31 - 1, 2**31 - 1])},
            Code.BAD_VALUE,
            "x/counts sum to 4294967294, but the device declared 15 samples",
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
            "row 1 of x/directions has more than 2 directions, the maximum for 6 samples",
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
        ([[1, 0.5, 0]], "soft predictions sum to 1.5 at row 0 of x/values, expected at most 1.002"),
        ([[1, 0, 0], [0.5, 0, 0.25]], "soft predictions sum to 0.75 at row 1 of x/values, expected at least 0.998"),
        ([[0, 0, 0]], "soft predictions sum to 0 at row 0 of x/values, expected at least 0.998"),
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
