"""What tensors and parts of a message must be: bytes, contract and ingest checks follow from this one description.

A kind of part (`fleetdistill.wire.kind.Kind`) makes the tensors of a part from sizes. A server half gives it the sizes
of a run or of a table, and reads bytes and terms of the contract from the result; the front gives it what the
contract says, with `ROWS` for what a device is free to choose, and holds an upload against the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from fleetdistill.wire.quantize import LARGEST, LARGEST_SCALE

if TYPE_CHECKING:
    from fleetdistill.wire.kind import Kind

ROWS = -1
"""Stands in an expected shape for the number of rows, which is free but the same for all columns of a part."""

FLOAT32, FLOAT16, FLOAT64 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<f8")
INT64, INT32, INT8, UINT8 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("i1"), np.dtype("u1")


class Floats(Enum):
    """Element types that depend on the kind and on the run."""

    KIND = "the number type of the kind, or of the run's knowledge"
    FEATURES = "the same, or steps of channels in a run of uint8"


KIND, FEATURES = Floats.KIND, Floats.FEATURES


def float_type(knowledge_type: np.dtype | type | str) -> np.dtype:
    """What knowledge travels in that is no feature column of own samples: float16 in a run of uint8."""
    found = np.dtype(knowledge_type)
    return FLOAT16 if found == UINT8 else found


def is_quantized(knowledge_type: np.dtype | type | str, shape: Sequence[int]) -> bool:
    """Whether a feature column travels as steps of its channels; `shape` is that of one sample, and has channels."""
    return np.dtype(knowledge_type) == UINT8 and len(shape) > 0


class TypedShape(tuple[int, ...]):
    """A shape that also says in which type the elements travel."""

    dtype: np.dtype

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype) -> TypedShape:
        """Both together."""
        made = cls(shape)
        made.dtype = dtype
        return made


@dataclass(frozen=True)
class TensorSchema:
    """What one tensor must be.

    Attributes:
        dtypes: Element types that are taken, the usual one first; or what the kind and the run make of it.
        shape: Expected shape with `ROWS` for the row axis; None where any shape fits.
        low: Smallest value, None for no bound. Floats must be finite in any case.
        high: First value that is too large, None for no bound.
        above: Values must be larger than this, None for no bound.
        unique: Values may not repeat.
        row_sums: Least and most that the numbers of a row may sum to, None for no bound.
        quantized: Whether the elements are steps on the scale of their channel.
        what: The column in words, for messages.
        channels: Of a feature column whose shape is only counted; None: its second axis.
    """

    dtypes: tuple[np.dtype, ...] | Floats
    shape: tuple[int, ...] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    unique: bool = False
    row_sums: tuple[float, float] | None = None
    quantized: bool = False
    what: str = "value"
    channels: int | None = None

    @property
    def types(self) -> tuple[np.dtype, ...]:
        """Element types of a tensor on the wire."""
        assert not isinstance(self.dtypes, Floats)
        return self.dtypes

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor on the wire, of its usual type."""
        assert self.shape is not None
        return math.prod(self.shape) * self.types[0].itemsize

    def on_the_wire(self, floats: np.dtype) -> dict[str, TensorSchema]:
        """The tensors that it is on the wire, by how their paths end.

        Args:
            floats: The number type of the kind, or the run's knowledge type.
        """
        if not isinstance(self.dtypes, Floats):
            return {"": self}
        if self.dtypes is FEATURES and self.shape is not None and is_quantized(floats, self.shape[1:]):
            return self._quantized(self.shape)
        return {"": replace(self, dtypes=(float_type(floats),))}

    def _quantized(self, shape: tuple[int, ...]) -> dict[str, TensorSchema]:
        """In channel steps: with its scales in these bounds, every number that it stands for is finite."""
        too_large, too_long = (float(np.nextafter(np.float32(most), np.inf)) for most in (LARGEST, LARGEST_SCALE))
        scales = shape[1:2] if self.channels is None else (self.channels,)
        return {
            "": replace(self, dtypes=(UINT8,), quantized=True),
            "/step": TensorSchema((FLOAT32,), scales, low=0, high=too_long, what="step"),
            "/minimum": TensorSchema((FLOAT32,), scales, low=-LARGEST, high=too_large, what="minimum"),
        }


Tensors = Mapping[str, TensorSchema]
"""The tensors of a part by their path within it."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""


@dataclass(frozen=True, kw_only=True)
class PartSchema:
    """A part of a message: its tensors with their sizes, and what a contract says of it.

    Attributes:
        kind: Its kind.
        tensors: Its tensors.
        columns: What it holds of a device, in the words of `fleetdistill.COLUMNS`.
        features: The feature columns that it holds or is made of, by cut, with the shape of one sample.
        declared: Shapes that the contract declares for it.
        least_samples: Samples that a class in it must have.
        most_rows: The most directions that it may have.
        rows_per_direction: Samples of a class, or degrees of freedom, that there must be for each direction.
        sent: Whether these settings send it. Contracts have always declared parts that others send, so they are here.
    """

    kind: type[Kind]
    tensors: Tensors = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    features: Shapes = field(default_factory=dict)
    declared: Shapes = field(default_factory=dict)
    least_samples: int = 0
    most_rows: int = 0
    rows_per_direction: int = 0
    sent: bool = True

    def when(self, sent: bool) -> PartSchema:
        """The same, sent or only declared."""
        return replace(self, sent=sent)

    def on_the_wire(self, knowledge_type: np.dtype | type | str) -> dict[str, TensorSchema]:
        """Its tensors as they travel in a run of that knowledge type, by path."""
        return on_the_wire(self.kind, self.tensors, knowledge_type)

    def nbytes(self, knowledge_type: np.dtype | type | str) -> int:
        """Tensor bytes of the part."""
        return sum(one.nbytes for one in self.on_the_wire(knowledge_type).values())


def on_the_wire(kind: type[Kind], tensors: Tensors, knowledge_type: np.dtype | type | str) -> dict[str, TensorSchema]:
    """The tensors of a part as they travel in a run of that knowledge type, by path."""
    floats = np.dtype(knowledge_type) if kind.wire_type is None else kind.wire_type
    return {f"{path}{end}": one for path, schema in tensors.items() for end, one in schema.on_the_wire(floats).items()}
