"""Kinds that carry a network, or a gradient for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Array, Kind, declared_of
from fleetdistill.wire.payload import DTYPES, slots
from fleetdistill.wire.schema import FLOAT32, INT64, UINT8, PartSchema, Tensors, TensorSchema, TypedShape
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

_MOST_NAMED = 5
"""Tensors that an error names, of those that are missing."""


@dataclass(frozen=True)
class Weights:
    """The size of a model, or of a part of one.

    Attributes:
        parameters: Trainable numbers, which travel as float32 whatever the knowledge type is.
        buffer_bytes: Bytes of the buffers beside them: 8 a channel and 8 a layer of batch-norm.
        tensors: Its tensors by path within `ModelParameters`, where they are known.
    """

    parameters: int
    buffer_bytes: int = 0
    tensors: Mapping[str, TypedShape] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sent: ModelParameters) -> Weights:
        """The size of parameters and buffers as they travel."""
        parameters = {f"parameters/{name}": _typed_shape(one) for name, one in sent.parameters.items()}
        buffers = {f"buffers/{name}": _typed_shape(one) for name, one in sent.buffers.items()}
        numbers = sum(one.size for one in sent.parameters.values())
        return cls(numbers, sum(one.nbytes for one in sent.buffers.values()), {**parameters, **buffers})

    def numbers(self) -> dict[str, int]:
        """Its size as plain data."""
        return {"parameters": self.parameters, "buffer_bytes": self.buffer_bytes}

    def shapes(self) -> Mapping[str, TypedShape]:
        """Its tensors; where they are not known, one for all parameters and one for all buffers."""
        counted = {
            "parameters": TypedShape.of((self.parameters,), FLOAT32),
            "buffers": TypedShape.of((self.buffer_bytes,), UINT8),
        }
        return self.tensors or counted

    def gradients(self) -> Mapping[str, TypedShape]:
        """The same of gradients, which buffers have none of."""
        named = {path.partition("/"): shape for path, shape in self.shapes().items()}
        return {f"gradients{end}{name}": shape for (of, end, name), shape in named.items() if of == "parameters"}


def _typed_shape(array: Array) -> TypedShape:
    return TypedShape.of(array.shape, FLOAT32 if array.dtype.kind == "f" else array.dtype)


def _of_shapes(kind: type[Kind], shapes: Mapping[str, TypedShape]) -> PartSchema:
    tensors = {path: TensorSchema((shape.dtype,), tuple(shape)) for path, shape in shapes.items()}
    return PartSchema(kind=kind, tensors=tensors, columns=kind.tells or (), declared=shapes)


def _declared_tensors(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, TensorSchema]:
    """Exactly the tensors that the contract declares for this part, so that the engine need not look again."""
    declared = {one.name: one for one in declared_of(part, contract).tensors}
    sent = {slot.path.removeprefix(f"{part.name}/") for slot in slots(knowledge_pb2.Parts(parts=[part]))}
    if missing := sorted(declared.keys() - sent):
        text = f"part {part.name!r} lacks {', '.join(missing[:_MOST_NAMED])}"
        raise RefusedError(Code.BAD_TENSOR, text, {"tensor": missing[0]})
    return {name: TensorSchema(_declared_types(one), tuple(one.shape)) for name, one in declared.items()}


def _declared_types(declared: contract_pb2.NamedShape) -> tuple[np.dtype[Any], ...]:
    """What the contract says; in one from before it said types, scalar buffers may be counters, the rest is float32."""
    if declared.element_type in DTYPES:
        return (DTYPES[declared.element_type],)
    counter = "buffers" in declared.name.split("/") and not declared.shape
    return (FLOAT32, INT64) if counter else (FLOAT32,)


class _Network(Kind):
    """Of the declared tensors; a negative variance would make the outputs of a whole fleet's mean not a number."""

    tells = ("parameters",)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """As `Kind`'s."""
        tensors = _declared_tensors(part, contract)
        variances = {path: one for path, one in tensors.items() if path.endswith("running_var")}
        return tensors | {path: replace(one, low=0, what="running variance") for path, one in variances.items()}


@dataclass(frozen=True, kw_only=True)
class ModelParameters(_Network):
    """Parameters and buffers of a model, or of the part of it that `scope` names."""

    wire_name = "model_parameters"
    words = "model"

    parameters: Mapping[str, Array]
    buffers: Mapping[str, Array] = field(default_factory=dict)
    scope: str = "model"

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """The part with a model of that size."""
        return _of_shapes(cls, weights.shapes())


class _Holder(_Network):
    """A kind with a network of its own in `parameters`."""

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """The part with a network of that size."""
        return _of_shapes(cls, {f"parameters/{path}": shape for path, shape in weights.shapes().items()})


@dataclass(frozen=True, kw_only=True)
class Generator(_Holder):
    """A generator of samples or features from noise vectors of `noise_size` numbers."""

    wire_name = "generator"
    words = "generator"

    parameters: ModelParameters
    noise_size: int


@dataclass(frozen=True, kw_only=True)
class Discriminator(_Holder):
    """A discriminator, or only its head when it shares the classifier's extractor."""

    wire_name = "discriminator"
    words = "discriminator"

    parameters: ModelParameters
    shares_extractor: bool


@dataclass(frozen=True, kw_only=True)
class DistillationGradient(Kind):
    """Gradient of a distillation loss by parameter name, with the batch size behind it.

    `loss` is the mean (nats) over rows that are the same in all steps of a round, for a server that compares steps.
    """

    wire_name = "distillation_gradient"
    tells = ("gradients",)
    words = "gradients on own samples"

    gradients: Mapping[str, Array]
    batch_size: int
    loss: float

    @classmethod
    def schema(cls, weights: Weights) -> PartSchema:
        """The part with gradients of a model of that size."""
        return _of_shapes(cls, weights.gradients())

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """The declared tensors, all float32; an infinite loss is a diverged model's and may come, NaN may not."""
        sent = part.distillation_gradient
        if sent.batch_size < 1 or not sent.loss >= 0:
            text = f"part {part.name!r} has batch_size {sent.batch_size} and loss {sent.loss:g}, must be >= 1 and >= 0"
            raise RefusedError(Code.BAD_VALUE, text)
        tensors = _declared_tensors(part, contract)
        return {path: TensorSchema((FLOAT32,), one.shape, what="gradient") for path, one in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class NetworkFile(Kind):
    """A network as an ONNX file, `[n]` uint8, for devices without PyTorch; see `fleetdistill.light.light`."""

    wire_name = "network_file"

    onnx: Array
