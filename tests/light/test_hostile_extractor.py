"""Extractor files of a hostile server: a device refuses them before it runs them."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import TensorProto, helper

from fleetdistill.compute.onnx_extractor import OnnxExtractor
from fleetdistill.errors import WireError

IN = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])
OUT = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", None])


def file_of(nodes: list[Any], tensors: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "graph", [IN], [OUT], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def endless_loop() -> bytes:
    flag = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("x", "y")]
    same = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["x"], ["y"])]
    body = helper.make_graph(same, "body", [count, flag[0], rows[0]], [flag[1], rows[1]])
    tensors = [
        helper.make_tensor("times", TensorProto.INT64, [], [1 << 62]),
        helper.make_tensor("first", TensorProto.BOOL, [], [True]),
    ]
    return file_of([helper.make_node("Loop", ["times", "first", "input"], ["features"], body=body)], tensors)


def external_weights() -> bytes:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    place = tensor.external_data.add()
    place.key, place.value = "location", "device.json"
    return file_of([helper.make_node("Add", ["input", "w"], ["features"])], [tensor])


def varint(number: int) -> bytes:
    low = bytes([number & 0x7F])
    return low if number < 0x80 else bytes([low[0] | 0x80]) + varint(number >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def loop_behind_high_bits() -> bytes:
    """An operator whose field has number 2**29 + 4: onnxruntime reads 4, the operator's name."""
    node = helper.make_node("Identity", ["input"], ["features"])
    node.ClearField("op_type")
    nodes = field(1, node.SerializeToString() + field((1 << 29) + 4, b"Loop"))
    model = helper.make_model(helper.make_graph([], "graph", [IN], [OUT]), ir_version=8)
    graph = model.graph.SerializeToString() + nodes
    model.ClearField("graph")
    return bytes(model.SerializeToString()) + field(7, graph)


def huge_shape() -> bytes:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["sum"]),
        helper.make_node("Add", ["input", "sum"], ["features"]),
    ]
    return file_of(nodes, [helper.make_tensor("shape", TensorProto.INT64, [2], [1 << 20, 1 << 40])])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (endless_loop(), "has the operator Loop, which may never end"),
        (external_weights(), "refers to external weights"),
        (loop_behind_high_bits(), "a field has number 536870916"),
        (huge_shape(), "extractor"),
        (b"\xff" * 1000, "not a valid ONNX file"),
    ],
    ids=["loop", "external", "high-bits", "huge", "garbage"],
)
def test_a_hostile_extractor_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        OnnxExtractor(data, [4])
