"""Model files that no device has made, in the place of `model.onnx`: refused, or an error of this package's tree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from fleetdistill import Predictor
from fleetdistill.deployment import predictor as deployed
from fleetdistill.deployment.stamp import stamp
from fleetdistill.errors import ModelError

FLOAT = TensorProto.FLOAT
IN = helper.make_tensor_value_info("input", FLOAT, ["N", 4])
OUT = helper.make_tensor_value_info("logits", FLOAT, ["N", None])
SAME = helper.make_node("Identity", ["input"], ["logits"])
METADATA = {"version": "1", "round": "1", "class_names": "a,b", "run": "r"}


def file_of(
    *nodes: Any,
    tensors: Sequence[Any] = (),
    inputs: Sequence[Any] = (IN,),
    outputs: Sequence[Any] = (OUT,),
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(tensors))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return stamp(model.SerializeToString(), {**METADATA, **(metadata or {})})


def external(place: str) -> bytes:
    """Weights of four float32 from another file."""
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": place, "length": "16"}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return file_of(helper.make_node("Add", ["input", "w"], ["logits"]), tensors=[tensor])


def of_type(kind: int) -> bytes:
    return file_of(
        helper.make_node("Cast", ["input"], ["logits"], to=kind),
        outputs=[helper.make_tensor_value_info("logits", kind, ["N", 4])],
    )


SEQUENCE = file_of(
    helper.make_node("SequenceConstruct", ["input", "input"], ["logits"]),
    outputs=[helper.make_tensor_sequence_value_info("logits", FLOAT, None)],
)
TWO_INPUTS = file_of(
    helper.make_node("Add", ["input", "b"], ["logits"]), inputs=[IN, helper.make_tensor_value_info("b", FLOAT, [4])]
)
NO_INPUT = file_of(helper.make_node("Constant", [], ["logits"], value_floats=[1.0]), inputs=[])
OTHER_OUTPUT = file_of(
    helper.make_node("Identity", ["input"], ["other"]), outputs=[helper.make_tensor_value_info("other", FLOAT, None)]
)
HUGE_WEIGHTS = file_of(
    helper.make_node("Add", ["input", "w"], ["logits"]),
    tensors=[TensorProto(name="w", data_type=FLOAT, dims=[1 << 40])],
)
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
FUNCTIONS = [
    helper.make_function(
        "own",
        f"f{number}",
        ["x"],
        ["z"],
        [helper.make_node(f"f{number + 1}", [x], [y], domain="own") for x, y in (("x", "y"), ("y", "z"))]
        if number < 29
        else [helper.make_node("Identity", ["x"], ["z"])],
        OPSETS,
    )
    for number in range(30)
]
"""Each calls the next one twice, so that onnxruntime would make 2**29 operators of them."""
CALLS = helper.make_graph([helper.make_node("f0", ["input"], ["logits"], domain="own")], "graph", [IN], [OUT])
WITH_FUNCTIONS = stamp(
    helper.make_model(CALLS, functions=FUNCTIONS, opset_imports=OPSETS, ir_version=8).SerializeToString(), METADATA
)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (external("secret.bin"), "refers to external weights"),
        (external("../../etc/passwd"), "refers to external weights"),
        (external("*/_ORT_MEM_ADDR_/*"), "refers to external weights"),
        (TWO_INPUTS, "has 2 inputs and 1 outputs"),
        (NO_INPUT, "has 0 inputs and 1 outputs"),
        (SEQUENCE, r"'logits' of type seq\(tensor\(float\)\)"),
        (of_type(TensorProto.STRING), r"'logits' of type tensor\(string\)"),
        (of_type(TensorProto.INT64), r"'logits' of type tensor\(int64\)"),
        (OTHER_OUTPUT, "the output 'other', expected 'logits'"),
        (HUGE_WEIGHTS, "cannot be loaded into onnxruntime"),
        (file_of(SAME, metadata={"version": "²"}), "no version in its metadata"),
        (file_of(SAME, metadata={"round": "9" * 5000}), "no round in its metadata"),
        (stamp(b"\xff" * 100, METADATA), "not a valid ONNX file"),
        (WITH_FUNCTIONS, "has functions, which are not allowed"),
    ],
    ids=[
        *("beside", "above", "memory", "inputs", "no-input", "sequence", "strings", "integers", "output", "weights"),
        *("version", "round", "garbage", "functions"),
    ],
)
def test_a_hostile_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    Path("model.onnx").write_bytes(file_of(SAME))
    predictor = Predictor(tmp_path)
    Path("model.onnx").write_bytes(data)
    inputs = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(predictor.predict(inputs), inputs)  # by the model from before
    with pytest.raises(ModelError, match=words):
        Predictor(tmp_path).predict(inputs)


def huge_constant() -> bytes:
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [1 << 50])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["sum"]),
        helper.make_node("Add", ["input", "sum"], ["logits"]),
    ]
    return file_of(*nodes, tensors=[shape])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (file_of(helper.make_node("ReduceSum", ["input"], ["logits"], keepdims=0)), r"gives shape \[\] for a batch"),
        (huge_constant(), "cannot process a batch"),
    ],
    ids=["scalar", "constant"],
)
def test_hostile_predictions_are_model_errors(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(ModelError, match=words):
        Predictor(tmp_path).predict(np.ones((2, 4), np.float32))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
@pytest.mark.parametrize("name", ["pipe", "device"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.onnx"
    make = {"pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero")}
    make[name]()
    predictor = Predictor(tmp_path)
    assert not predictor.ready
    assert predictor.error == "the file is not a regular file"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "MAX_FILE_BYTES", 100)
    (tmp_path / "model.onnx").write_bytes(file_of(SAME))
    size = (tmp_path / "model.onnx").stat().st_size
    assert Predictor(tmp_path).error == f"the file has {size} bytes, must be at most 100"
