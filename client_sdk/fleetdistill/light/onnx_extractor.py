"""Loads and runs the extractor of a run from its ONNX file, on devices without PyTorch.

The file comes from the server, so it is checked before onnxruntime loads it: only standard operators and embedded
weights are allowed. ONNX's external data could otherwise refer to files or memory of the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fleetdistill.errors import ModelError, WireError
from fleetdistill.interruption import check_may_continue
from fleetdistill.knowledge import Array, NetworkFile, Parts
from fleetdistill.methods.classstats.projection import projection
from fleetdistill.progress import report_progress
from fleetdistill.training.onnx_file import cpu_session

PART = "extractor"
"""Name of the payload's part with the extractor file."""
_INPUT = "input"
_BATCH = 8  # as fast as 32 for 28x28 images, with 18 MB less memory
_ADVICE = "the server's operator must fix the run"
_STANDARD = (b"", b"ai.onnx")  # domain names of standard operators
_DEEPEST = 50
# Field numbers in onnx.proto of the nested messages that can contain tensors or operators, by message.
_WITHIN: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
_NODE_OPERATOR, _NODE_DOMAIN = 4, 7
_REPEATING = (b"Loop", b"Scan")
"""Operators that may repeat for ever."""
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class OnnxExtractor:
    """Extractor that maps inputs to features, run with onnxruntime.

    The counterpart with PyTorch is `fleetdistill.methods.classstats.kept_features.FixedFeatures`.

    Attributes:
        features: Number of features F of one input.
        data: Content of the ONNX file.
    """

    def __init__(self, data: bytes, input_shape: Sequence[int], threads: int = 1) -> None:
        """Loads the file and computes a test batch.

        Args:
            data: ONNX file with one input `input`, float32 `[batch, *input_shape]`, and one output, float32
                `[batch, ...]`.
            input_shape: Shape of one input of the run.
            threads: Number of threads, at least 1; limited to the number of processors.

        Raises:
            WireError: The file is invalid.
            ModelError: onnxruntime is not installed.
        """
        self.data = data
        self._input_shape = tuple(input_shape)
        self._session = _loaded(data, min(max(threads, 1), os.cpu_count() or 1))
        self.features = prod(self._run(np.zeros((2, *self._input_shape), np.float32)).shape[1:])
        self._signs: Array | None = None

    def of(self, inputs: Array) -> Array:
        """Returns features `[n, F]` float32 for inputs `[n, *input_shape]`.

        Raises:
            WireError: A feature is not finite.
        """
        return np.concatenate([np.zeros((0, self.features), np.float32), *self._batches(inputs)])

    def projected(self, inputs: Array, dimensions: int) -> Array:
        """Returns projected features `[n, D]` float32; computed in batches, because F can be large."""
        if self._signs is None or self._signs.shape[1] != dimensions:
            self._signs = projection(self.features, dimensions)
        empty = np.zeros((0, dimensions), np.float32)
        return np.concatenate([empty, *(part @ self._signs for part in self._batches(inputs))])

    def _batches(self, inputs: Array) -> Iterator[Array]:
        for start in range(0, len(inputs), _BATCH):
            check_may_continue()
            report_progress("inference", start / len(inputs))
            part = self._run(inputs[start : start + _BATCH]).reshape(-1, self.features)
            if not np.isfinite(part).all():
                row = start + int(np.argwhere(~np.isfinite(part))[0][0])
                raise WireError(f"the run's extractor file gives features of row {row} that are not finite; {_ADVICE}")
            yield part

    def _run(self, inputs: Array) -> Array:
        try:
            found = self._session.run(None, {_INPUT: np.ascontiguousarray(inputs, np.float32)})[0]
        except Exception as error:  # onnxruntime raises its own exception types
            shape = list(self._input_shape)
            raise WireError(
                f"the run's extractor file does not accept inputs of shape {shape}: {_first_line(error)}; {_ADVICE}"
            ) from error
        if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.ndim < 2:
            text = f"{getattr(found, 'dtype', type(found).__name__)} of shape {list(np.shape(found))}"
            raise WireError(f"the run's extractor file gives {text}, expected float32 [batch, ...]; {_ADVICE}")
        if len(found) != len(inputs) or not found.size:
            text = f"{list(found.shape)} for a batch of {len(inputs)}"
            raise WireError(f"the run's extractor file gives {text}, expected one row for each input; {_ADVICE}")
        return found


def extractor_of(parts: Parts, input_shape: Sequence[int], threads: int) -> OnnxExtractor:
    """Returns the extractor in a payload's parts. Raises the same errors as `OnnxExtractor`."""
    found = parts.get(PART)
    if not isinstance(found, NetworkFile):
        raise WireError(f"part {PART!r} is {type(found).__name__}, expected a NetworkFile; {_ADVICE}")
    if found.onnx.dtype != np.uint8 or found.onnx.ndim != 1:
        raise WireError(
            f"part {PART!r} has {found.onnx.dtype} {list(found.onnx.shape)}, expected uint8 [bytes]; {_ADVICE}"
        )
    return OnnxExtractor(found.onnx.tobytes(), input_shape, threads)


def _loaded(data: bytes, threads: int) -> Any:
    """Returns a checked onnxruntime session for a file."""
    check_self_contained(data)
    try:
        session = cpu_session(data, threads)
    except ImportError as error:
        raise ModelError("a device without PyTorch requires onnxruntime: pip install 'fleetdistill[light]'") from error
    except Exception as error:
        text = f"onnxruntime cannot load the run's extractor file: {_first_line(error)}"
        raise WireError(f"{text}; {_ADVICE}") from error
    inputs, outputs = ([one.name for one in found] for found in (session.get_inputs(), session.get_outputs()))
    if inputs != [_INPUT] or len(outputs) != 1:
        text = f"inputs {inputs[:3]} and {len(outputs)} outputs, expected {_INPUT!r} and one output"
        raise WireError(f"the run's extractor file has {text}; {_ADVICE}")
    return session


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def check_self_contained(data: bytes) -> None:
    """Raises WireError for a file with external data, loops or non-standard operators, or that is not ONNX."""
    waiting: list[tuple[str, memoryview, int]] = [("model", memoryview(data), 0)]
    try:
        while waiting:
            kind, message, depth = waiting.pop()
            if depth > _DEEPEST:
                raise WireError(f"the run's extractor file is nested more than {_DEEPEST} levels deep; {_ADVICE}")
            for number, value in _fields(message):
                _check_field(kind, number, value)
                inner = _WITHIN.get(kind, {}).get(number)
                if inner is not None:
                    waiting.append((inner, _as_message(value), depth + 1))
    except (IndexError, ValueError) as error:
        raise WireError(f"the run's extractor file is not a valid ONNX file: {error}; {_ADVICE}") from error


def _check_field(kind: str, number: int, value: memoryview | int) -> None:
    if kind == "tensor" and (number == _TENSOR_EXTERNAL or (number == _TENSOR_LOCATION and value != 0)):
        raise WireError(f"the run's extractor file refers to external weights, which are not allowed; {_ADVICE}")
    if kind == "node" and number == _NODE_OPERATOR and bytes(_as_message(value)) in _REPEATING:
        text = f"the run's extractor file has the operator {bytes(_as_message(value)).decode()}, which may never end"
        raise WireError(f"{text}; {_ADVICE}")
    if kind == "node" and number == _NODE_DOMAIN and bytes(_as_message(value)) not in _STANDARD:
        domain = bytes(_as_message(value))[:50].decode(errors="replace")
        text = f"the run's extractor file has an operator of domain {domain!r}, only standard operators are allowed"
        raise WireError(f"{text}; {_ADVICE}")


def _as_message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("expected a message, found a number")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yields field numbers and values of a protobuf message, without copying."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire_type == _LENGTH:
            size, at = _varint(message, at)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"a field has unsupported wire type {wire_type}, expected 0, 1, 2 or 5")
        if at + size > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a protobuf varint is longer than 10 bytes")
