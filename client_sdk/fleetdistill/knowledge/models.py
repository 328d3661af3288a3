"""Kinds of parts that contain a network or its gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import COLUMNS, Array, Kind, PartSchema, declared_of
from fleetdistill.wire.payload import DTYPES, tensor_paths
from fleetdistill.wire.schema import FLOAT32, UINT8, Shapes, Tensors, TensorSchema, TypedShape
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

_MAX_NAMED = 5
"""Maximum number of missing tensors that an error names."""


@dataclass(frozen=True)
class Weights:
    """Size of a model, or of a part of a model.

    Attributes:
        parameters: Number of trainable parameters, sent as float32 for every knowledge type.
        buffer_bytes: Size of the buffers in bytes: 8 per channel and 8 per layer of batch-norm.
        tensors: Shapes and types by path in `ModelParameters`, or empty if they are unknown.
    """

    parameters: int
    buffer_bytes: int = 0
    tensors: Mapping[str, TypedShape] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sent: ModelParameters) -> Weights:
        """Returns the size of the parameters and buffers in a message."""
        parameters = {f"parameters/{name}": _typed_shape(one) for name, one in sent.parameters.items()}
        buffers = {f"buffers/{name}": _typed_shape(one) for name, one in sent.buffers.items()}
        numbers = sum(parameter.size for parameter in sent.parameters.values())
        return cls(numbers, sum(buffer.nbytes for buffer in sent.buffers.values()), {**parameters, **buffers})

    def numbers(self) -> dict[str, int]:
        """Returns the size as a dict for JSON."""
        return {"parameters": self.parameters, "buffer_bytes": self.buffer_bytes}

    def shapes(self) -> Mapping[str, TypedShape]:
        """Returns shapes and types by path; if unknown, one entry each for all parameters and all buffers."""
        counted = {
            "parameters": TypedShape.of((self.parameters,), FLOAT32),
            "buffers": TypedShape.of((self.buffer_bytes,), UINT8),
        }
        return self.tensors or counted

    def gradients(self) -> Mapping[str, TypedShape]:
        """Returns shapes and types of the gradients by path; buffers have no gradients."""
        named = {path.partition("/"): shape for path, shape in self.shapes().items()}
        return {f"gradients{end}{name}": shape for (of, end, name), shape in named.items() if of == "parameters"}


def _typed_shape(array: Array) -> TypedShape:
    return TypedShape.of(array.shape, FLOAT32 if array.dtype.kind == "f" else array.dtype)


def _of_shapes(kind: type[Kind], shapes: Mapping[str, TypedShape]) -> PartSchema:
    tensors = {path: TensorSchema((shape.dtype,), tuple(shape)) for path, shape in shapes.items()}
    return PartSchema(kind=kind, tensors=tensors, columns=kind.possible_columns or (), declared=shapes)


def _declared_tensors(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str] = ()
) -> dict[str, TensorSchema]:
    """Returns the tensors that the contract declares for a part, or those of them that the ask wants.

    Raises:
        RefusedError: One is missing.
    """
    declared = {
        tensor.name: tensor
        for tensor in declared_of(part, contract).tensors
        if not wanted or f"{part.name}/{tensor.name}" in wanted
    }
    if missing := sorted(declared.keys() - tensor_paths(part)):
        text = f"part {part.name!r} lacks {', '.join(missing[:_MAX_NAMED])}"
        raise RefusedError(Code.BAD_TENSOR, text, {"tensor": missing[0]})
    return {name: TensorSchema((DTYPES[one.element_type],), tuple(one.shape)) for name, one in declared.items()}


class _Network(Kind):
    """Base of kinds with a network; rejects negative running variances, which would make the outputs NaN."""

    possible_columns = ("parameters",)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`."""
        tensors = _declared_tensors(part, contract, wanted)
        variances = {path: one for path, one in tensors.items() if path.endswith("running_var")}
        return tensors | {path: replace(one, low=0, what="running variance") for path, one in variances.items()}


@dataclass(frozen=True, kw_only=True)
class ModelParameters(_Network):
    """Parameters and buffers of a model, or of its part named by `scope`."""

    wire_name = "model_parameters"
    description = "model"

    parameters: Mapping[str, Array]
    buffers: Mapping[str, Array] = field(default_factory=dict)
    scope: str = "model"

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """Returns the schema of a part with a model of this size."""
        return _of_shapes(cls, weights.shapes())

    def only(self, names: Collection[str]) -> ModelParameters:
        """Returns the parameters and buffers of these names."""
        parameters, buffers = (
            {name: array for name, array in arrays.items() if name in names}
            for arrays in (self.parameters, self.buffers)
        )
        return replace(self, parameters=parameters, buffers=buffers)


@dataclass(frozen=True, kw_only=True)
class NamedTensors(Kind):
    """Tensors of a method that no other kind describes, such as class prototypes or a classifier's statistics.

    The front accepts exactly the tensors that `exchanges` of the server half declares with `schema`: their names,
    shapes and element types, all numbers finite.

    Attributes:
        tensors: Arrays by name, float32, float64, int32 or int64; floats travel as float32.
        reveals: Columns of the device that they contain, names in `fleetdistill.COLUMNS`; empty from a server. The app
            must allow them.
    """

    wire_name = "named_tensors"
    possible_columns = COLUMNS
    description = "own tensors"

    tensors: Mapping[str, Array]
    reveals: list[str] = field(default_factory=list)

    def columns(self) -> tuple[str, ...]:
        """See `Kind.columns`."""
        return tuple(self.reveals)

    @classmethod
    def schema(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        reveals: Sequence[str] = (),
        dtype: np.dtype | type = FLOAT32,
        features: Shapes = MappingProxyType({}),
    ) -> PartSchema:
        """Returns the schema of a part.

        Args:
            shapes: Shape of each tensor by name; a `TypedShape` has an element type of its own.
            reveals: Columns of the device that the tensors contain.
            dtype: Element type of the other tensors.
            features: Feature columns that the tensors are computed from: shape of one sample by cut. A device whose
                model has other shapes is told so when it checks in.
        """
        typed = {
            f"tensors/{name}": shape if isinstance(shape, TypedShape) else TypedShape.of(tuple(shape), dtype)
            for name, shape in shapes.items()
        }
        tensors = {path: TensorSchema((shape.dtype,), tuple(shape)) for path, shape in typed.items()}
        return PartSchema(kind=cls, tensors=tensors, columns=tuple(reveals), features=features, declared=typed)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`: exactly the declared tensors."""
        return _declared_tensors(part, contract)


class _Holder(_Network):
    """Base of kinds whose field `parameters` is a `ModelParameters`."""

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """Returns the schema of a part with a network of this size."""
        return _of_shapes(cls, {f"parameters/{path}": shape for path, shape in weights.shapes().items()})


@dataclass(frozen=True, kw_only=True)
class Generator(_Holder):
    """Generator that maps noise vectors `[noise_size]` to samples or features."""

    wire_name = "generator"
    description = "generator"

    parameters: ModelParameters
    noise_size: int


@dataclass(frozen=True, kw_only=True)
class Discriminator(_Holder):
    """Discriminator, or only its head if it shares the classifier's extractor."""

    wire_name = "discriminator"
    description = "discriminator"

    parameters: ModelParameters
    shares_extractor: bool


@dataclass(frozen=True, kw_only=True)
class DistillationGradient(Kind):
    """Gradient of a distillation loss by parameter name, with its batch size.

    `loss` is the mean loss in nats over the same rows in all steps of a round, so that a server can compare steps.
    """

    wire_name = "distillation_gradient"
    possible_columns = ("gradients",)
    description = "gradients on own samples"

    gradients: Mapping[str, Array]
    batch_size: int
    loss: float

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """Returns the schema of a part with gradients of a model of this size."""
        return _of_shapes(cls, weights.gradients())

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`: the declared tensors in float32. The loss must not be NaN, but may be infinite."""
        sent = part.distillation_gradient
        if sent.batch_size < 1 or not sent.loss >= 0:
            text = f"part {part.name!r} has batch_size {sent.batch_size} and loss {sent.loss:g}, must be >= 1 and >= 0"
            raise RefusedError(Code.BAD_VALUE, text)
        tensors = _declared_tensors(part, contract)
        return {path: TensorSchema((FLOAT32,), one.shape, what="gradient") for path, one in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class NetworkFile(Kind):
    """Network as an ONNX file, `[bytes]` uint8, for devices without PyTorch; see `light_worker`."""

    wire_name = "network_file"

    onnx: Array
