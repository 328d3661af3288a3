"""Model variants of a device without PyTorch: closed-form classifiers on the run's extractor, and their ONNX export."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fleetdistill.compute.onnx_extractor import OnnxExtractor
from fleetdistill.deployment.batch import check_batch, shape_message
from fleetdistill.errors import DataError, ExportError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import BELOW_ALL, coordinates, logits, projection
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

_SPACE_FIELDS = tuple(field.name for field in fields(ClassSpace) if field.name != "labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class SpaceClassifier:
    """Classifier in a class space; the personal variant also has a temperature and class shares."""

    space: ClassSpace
    temperature: float = 1.0
    prior: Array | None = None

    def logits(self, coordinates_nq: Array, classes: int) -> Array:
        """Returns logits `[n, C]` float64 for coordinates in the space."""
        scaled = logits(self.space, coordinates_nq, classes) / self.temperature
        return scaled if self.prior is None else scaled + np.log(self.prior)


class LightModel:
    """Model variant of a device without PyTorch, updated in place by deliveries. Call it with a batch of inputs."""

    def __init__(
        self, extractor: OnnxExtractor, input_shape: Sequence[int], classes: int, classifier: SpaceClassifier
    ) -> None:
        self.extractor = extractor
        self.classes = classes
        self._input_shape = tuple(input_shape)
        # Classifier and matrix are replaced together, because another thread of the app may be using them.
        self._current: tuple[SpaceClassifier, Array | None] = (classifier, None)

    @property
    def classifier(self) -> SpaceClassifier:
        """The classifier that follows the extractor."""
        return self._current[0]

    @classifier.setter
    def classifier(self, classifier: SpaceClassifier) -> None:
        self._current = (classifier, None)

    def __call__(self, inputs: Array) -> Array:
        """Returns logits `[n, C]` float32 for inputs `[n, *input_shape]`.

        Raises:
            DataError: The inputs have another shape.
        """
        inputs = np.asarray(inputs, np.float32)
        if inputs.shape[1:] != self._input_shape or not inputs.ndim:
            raise DataError(f"{shape_message(inputs.shape, self._input_shape)}; a single image is a batch of 1")
        classifier, matrix = self._current
        if matrix is None:
            matrix = self.matrix()
            self._current = (classifier, matrix)
        coordinates_nq = self.extractor.of(inputs) @ matrix - classifier.space.origin.astype(np.float32)
        return classifier.logits(coordinates_nq, self.classes).astype(np.float32)

    def logits_of_features(self, rows_nd: Array) -> Array:
        """Returns logits `[n, C]` for projected features `[n, D]`."""
        return self.classifier.logits(coordinates(self.classifier.space, rows_nd), self.classes)

    def matrix(self) -> Array:
        """Returns the product of projection and space directions, `[F, q]` float32."""
        directions = self.classifier.space.directions.astype(np.float64)
        signs = projection(self.extractor.features, len(directions))
        return np.asarray(signs @ directions, dtype=np.float32)


class FrozenLightModel:
    """A `LightModel` for `Device.predict`: nobody else has a reference to it, so deliveries do not change it."""

    def __init__(self, model: LightModel, input_shape: Sequence[int]) -> None:
        self._model = model
        self._input_shape = tuple(input_shape)

    def __call__(self, inputs: Array) -> Array:
        """Returns logits `[n, C]` float32 for inputs `[n, *input_shape]`. Raises DataError for other inputs."""
        check_batch(inputs, self._input_shape)
        return self._model(inputs)


def pack_variants(outline: Mapping[str, Any], spaces: Mapping[str, ClassSpace], priors: Mapping[str, Array]) -> bytes:
    """Packs spaces and priors in NumPy's format, without pickle, and an outline in JSON.

    Args:
        outline: Values that JSON supports.
        spaces: Class spaces by name of the variant.
        priors: Class shares by name of the variant, which must have a space.
    """
    arrays = {f"{name}/{key}": getattr(space, key) for name, space in spaces.items() for key in _SPACE_FIELDS}
    arrays |= {f"{name}/prior": prior for name, prior in priors.items()}
    labels = {name: list(space.labels) for name, space in spaces.items()}
    file = io.BytesIO()
    np.savez(file, outline=np.array(json.dumps({**outline, "labels": labels})), **arrays)
    return file.getvalue()


def unpack_variants(saved: bytes) -> tuple[dict[str, Any], dict[str, ClassSpace], dict[str, Array]]:
    """Unpacks the arguments of `pack_variants`. Raises ValueError, KeyError, OSError or EOFError for invalid bytes."""
    try:
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            outline = json.loads(str(arrays["outline"]))
            spaces = {
                name: ClassSpace(
                    labels=labels,
                    leverage=float(arrays[f"{name}/leverage"]),
                    **{key: arrays[f"{name}/{key}"] for key in _SPACE_FIELDS if key != "leverage"},
                )
                for name, labels in outline["labels"].items()
            }
            priors = {name: arrays[f"{name}/prior"] for name in spaces if f"{name}/prior" in arrays}
    except (BadZipFile, AttributeError) as error:
        raise ValueError(str(error)) from error
    return outline, spaces, priors


# --- ONNX export of the model variants of a device without PyTorch; one graph maps inputs to logits.
#
# Appends the classifier's operators to the graph of the run's extractor. Requires the package `onnx`.

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
