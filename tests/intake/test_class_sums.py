"""Noisy class sums that no device of ours sends are refused; any finite ones are taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from intake.taken_in import refusal, said, take_in
from support.wire_samples import make_contract

from fleetdistill import knowledge as k
from fleetdistill.wire.codec import encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2

C, F = 3, 4
SUMS = k.ClassSums(
    counts=np.array([-3e30, 0, 5], np.float32),
    sums=np.full((C, F), -2.5, np.float32),
    second_moment=np.zeros(F * (F + 1) // 2, np.float32),
    mu=0.25,
    discrete=True,
)
EXPECTS = {"statistics": "class_sums"}


def contract():
    shapes = {"counts": (C,), "sums": (C, F), "second_moment": (F * (F + 1) // 2,)}
    made = make_contract()
    tensors = [contract_pb2.NamedShape(name=name, shape=shape) for name, shape in shapes.items()]
    made.uploads.add(part="statistics", tensors=tensors)
    return made


def test_noise_may_make_numbers_negative_and_large():
    take_in(encode({"statistics": SUMS}), contract=contract(), expects=EXPECTS)


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"mu": 0.0}, Code.BAD_VALUE, "part 'statistics' has mu 0.0, must be a finite number above 0"),
        ({"mu": -1.0}, Code.BAD_VALUE, "part 'statistics' has mu -1.0, must be a finite number above 0"),
        ({"mu": float("nan")}, Code.BAD_VALUE, "part 'statistics' has mu nan, must be a finite number above 0"),
        ({"mu": float("inf")}, Code.BAD_VALUE, "part 'statistics' has mu inf, must be a finite number above 0"),
        (
            {"counts": np.array([0, np.nan, 0], np.float32)},
            Code.BAD_VALUE,
            "non-finite counts at row 1 of statistics/counts",
        ),
        ({"sums": np.full((C, F), np.inf, np.float32)}, Code.BAD_VALUE, "non-finite sums at row 0 of statistics/sums"),
    ],
)
def test_impossible_values_are_refused(changes, code, sentence):
    error = refusal(encode({"statistics": replace(SUMS, **changes)}), contract=contract(), expects=EXPECTS)
    assert said(error) == (code, f"device d1: {sentence}")


@pytest.mark.parametrize(
    "changes",
    [
        {"sums": np.zeros((C, F + 1), np.float32)},
        {"counts": np.zeros(C - 1, np.float32)},
        {"second_moment": np.zeros(F, np.float32)},
        {"second_moment": None},
    ],
)
def test_other_shapes_are_refused(changes):
    error = refusal(encode({"statistics": replace(SUMS, **changes)}), contract=contract(), expects=EXPECTS)
    assert error.code == Code.BAD_TENSOR
