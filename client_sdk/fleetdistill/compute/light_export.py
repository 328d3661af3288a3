"""ONNX export of the model variants of a device without PyTorch; one graph maps inputs to logits.

Appends the classifier's operators to the graph of the run's extractor. Requires the package `onnx`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill.compute.light_models import LightModel
from fleetdistill.errors import ExportError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import BELOW_ALL
from fleetdistill.state.durable import rename_durably
from fleetdistill.training.onnx_file import (
    OnnxReport,
    Reference,
    compare,
    doing,
    facts,
    finish,
    temporary_beside,
)

_TOLERANCE = 1e-4
_MIN_OPSET = 18  # required by ReduceMin with axes as an input
_OWN = "fleetdistill_"  # prefix of the names of added nodes
_REFERENCE = Reference(
    "this device",
    "the extractor's file does not support every batch size; the server's operator must export it again",
    "the extractor's file gives different outputs than before; the server's operator must export it again",
)


def export_model(model: LightModel, path: Path, samples: Array, metadata: Mapping[str, str]) -> OnnxReport:
    """Writes a variant as ONNX and compares the file with it.

    Args:
        model: The variant.
        path: File to write; its directory must exist.
        samples: Inputs `[n, *input_shape]`, n >= 1, on which the file is compared with the variant.
        metadata: Metadata of the file, as in `fleetdistill.training.onnx_export.export_onnx`.

    Raises:
        ExportError: `onnx` is not installed, or the file does not give the same outputs as the device.
    """
    _check_onnx()
    batches = [samples[:1], samples if len(samples) > 1 else np.concatenate([samples, samples])]
    expected = [model(batch) for batch in batches]
    with temporary_beside(path) as temporary:
        with doing("building the ONNX graph"):
            temporary.write_bytes(_graph_of(model).SerializeToString())
        size = finish(temporary, {**facts(samples.shape[1:], model.classes), **metadata})
        difference = compare(temporary, batches, expected, _TOLERANCE, _REFERENCE)
        with doing(f"writing {path}"):
            rename_durably(temporary, path)
    return OnnxReport(path=path, max_difference=difference, samples=len(samples), bytes=size)


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ExportError(
            "ONNX export requires the package onnx: pip install 'fleetdistill[onnx]', or use "
            'Deployment(export="never"); device.model works without a file'
        ) from error


def _graph_of(model: LightModel) -> Any:
    """Returns the extractor's graph with the nodes of projection, space and closed form appended."""
    import onnx

    proto = onnx.load_model_from_string(model.extractor.data)
    (opset,) = (item.version for item in proto.opset_import if item.domain in ("", "ai.onnx"))
    if opset < _MIN_OPSET:
        raise ExportError(f"the extractor's file has opset {opset}, must be at least {_MIN_OPSET}; update the server")
    added = _Chain(proto.graph)
    added.then("Flatten", axis=1)
    space = model.classifier.space
    centres = space.centres.astype(np.float64)
    added.then("MatMul", model.matrix())
    added.then("Sub", space.origin)
    added.then("MatMul", centres.T)
    added.then("Sub", np.square(centres).sum(axis=1) / 2)
    added.in_all_classes(space.labels, model.classes)
    added.then("Div", np.array(model.classifier.temperature))
    added.then("Add", np.zeros(model.classes) if model.classifier.prior is None else np.log(model.classifier.prior))
    added.end("logits", model.classes)
    return proto


class _Chain:
    """Chain of operators appended to a graph's output."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._value = graph.output[0].name
        self._count = 0

    def then(self, operator: str, constant: Array | None = None, **attributes: Any) -> None:
        """Appends an operator, with an optional float32 constant as its second input."""
        inputs = [self._value] if constant is None else [self._value, self._constant(constant.astype(np.float32))]
        self._value = self._node(operator, inputs, **attributes)

    def in_all_classes(self, labels: list[int], classes: int) -> None:
        """Expands the space's classes to all classes of the run; missing ones get a value below all others."""
        least = self._node("ReduceMin", [self._value, self._constant(np.array([1], np.int64))], keepdims=1)
        below = self._node("Sub", [least, self._constant(np.array(BELOW_ALL, np.float32))])
        wide = self._node("Concat", [self._value, below], axis=1)
        position = {label: number for number, label in enumerate(labels)}
        columns = np.array([position.get(label, len(labels)) for label in range(classes)], np.int64)
        self._value = self._node("Gather", [wide, self._constant(columns)], axis=1)

    def end(self, name: str, classes: int) -> None:
        """Makes the last value the only output of the graph."""
        from onnx import TensorProto, helper

        self._graph.node.append(helper.make_node("Identity", [self._value], [name]))
        del self._graph.output[:]
        self._graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", classes]))

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        name = self._name()
        self._graph.node.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def _constant(self, array: Array) -> str:
        from onnx import numpy_helper

        name = self._name()
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{_OWN}{self._count}"
