"""Opens ONNX files from elsewhere: of a server, or of another process. Does not import torch or onnx.

onnxruntime loads such a file only after its content is checked: ONNX's external data could otherwise refer to files or
memory of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetdistill.errors import ModelError
from fleetdistill.training.onnx_file import cpu_session
from fleetdistill.wire.protobuf_fields import fields_of

_STANDARD = (b"", b"ai.onnx")  # domain names of standard operators
_DEEPEST = 50
# Field numbers in onnx.proto of the nested messages that can contain tensors or operators, by message.
_WITHIN: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
_MODEL_FUNCTION = 25
_NODE_OPERATOR, _NODE_DOMAIN = 4, 7
_REPEATING = (b"Loop", b"Scan")
"""Operators that may repeat for ever."""
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14


def foreign_session(data: bytes, threads: int = 1, *, standard: bool = True) -> Any:
    """Creates an onnxruntime session on the CPU for a file from elsewhere.

    Args:
        data: Content of the file.
        threads: Number of threads of onnxruntime, at least 1.
        standard: Accept only standard operators without loops. False for a model, whose graph is that of the app.

    Raises:
        ModelError: The file is not ONNX, refers to external weights, has functions or operators that are not accepted,
            cannot be loaded, or does not map one float32 tensor `input` to one float32 tensor. The message continues
            "the file".
        ImportError: onnxruntime is not installed.
    """
    check_self_contained(data, standard=standard)
    try:
        session = cpu_session(data, threads)
    except ImportError:
        raise
    except Exception as error:  # onnxruntime raises its own exception types
        raise ModelError(f"cannot be loaded into onnxruntime: {first_line(error)}") from error
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if [input_.name for input_ in inputs] != ["input"] or [item.type for item in (*inputs, *outputs)] != [
        "tensor(float)"
    ] * 2:
        ends = ", ".join(f"{item.name[:40]!r} of type {item.type}" for item in (*inputs[:3], *outputs[:3]))
        raise ModelError(
            f"has {len(inputs)} inputs and {len(outputs)} outputs ({ends}), expected 'input' and one output, both "
            "float32 tensors"
        )
    return session


def first_line(error: Exception) -> str:
    """Returns the first line of onnxruntime's message, at most 300 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def check_self_contained(data: bytes, *, standard: bool = True) -> None:
    """Raises ModelError for external data, functions and other files than ONNX.

    With `standard`, loops and operators of other domains are errors, too.
    """
    waiting: list[tuple[str, memoryview, int]] = [("model", memoryview(data), 0)]
    try:
        while waiting:
            kind, message, depth = waiting.pop()
            if depth > _DEEPEST:
                raise ModelError(f"is nested more than {_DEEPEST} levels deep")
            for number, value, _ in fields_of(message):
                if kind == "model" and number == _MODEL_FUNCTION:  # those that call each other grow exponentially
                    raise ModelError("has functions, which are not allowed; inline them with onnx.inliner")
                if kind == "tensor" and (number == _TENSOR_EXTERNAL or (number == _TENSOR_LOCATION and value != 0)):
                    raise ModelError("refers to external weights, which are not allowed")
                if kind == "node" and standard:
                    _check_operator(number, value)
                inner = _WITHIN.get(kind, {}).get(number)
                if inner is not None:
                    waiting.append((inner, _as_message(value), depth + 1))
    except (IndexError, ValueError) as error:
        raise ModelError(f"is not a valid ONNX file: {error}") from error


def _check_operator(number: int, value: memoryview | int) -> None:
    if number == _NODE_OPERATOR and bytes(_as_message(value)) in _REPEATING:
        raise ModelError(f"has the operator {bytes(_as_message(value)).decode()}, which may never end")
    if number == _NODE_DOMAIN and bytes(_as_message(value)) not in _STANDARD:
        domain = bytes(_as_message(value)[:50]).decode(errors="replace")
        raise ModelError(f"has an operator of domain {domain!r}, only standard operators are allowed")


def _as_message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("expected a message, found a number")
    return value
