"""Schemas of tensors and parts; byte counts, the contract and ingest checks are derived from them.

A kind of part (`fleetdistill.wire.kind.Kind`) derives its tensors' schemas from sizes. A server half passes the sizes
of a run or of a table and derives bytes and the contract from the result. The front passes the contract's values, with
`ROWS` for sizes that a device can choose, and checks an upload against the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from fleetdistill.wire.payload import LARGEST, MAX_SCALE

__all__ = ["TypedShape"]

ROWS = -1
"""Placeholder for a number of rows in an expected shape; any number, but equal for all columns of a part."""

FLOAT32, FLOAT16, FLOAT64 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<f8")
INT64, INT32, INT8, UINT8 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("i1"), np.dtype("u1")


class Floats(Enum):
    """Element types that depend on the kind and the run."""

    KIND = "the number type of the kind, or of the run's knowledge"
    FEATURES = "the same, or steps of channels in a run of uint8"


KIND, FEATURES = Floats.KIND, Floats.FEATURES


def float_type(knowledge_type: np.dtype | type | str) -> np.dtype:
    """Returns the element type of knowledge other than quantized feature columns: float16 in a run of uint8."""
    result = np.dtype(knowledge_type)
    return FLOAT16 if result == UINT8 else result


def is_quantized(knowledge_type: np.dtype | type | str, shape: Sequence[int]) -> bool:
    """Returns whether a feature column is sent quantized; `shape` is the shape of one sample."""
    return np.dtype(knowledge_type) == UINT8 and len(shape) > 0


class TypedShape(tuple[int, ...]):
    """A shape with the element type on the wire."""

    dtype: np.dtype

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype | type) -> TypedShape:
        """Returns a shape with its element type."""
        made = cls(shape)
        made.dtype = np.dtype(dtype)
        return made


@dataclass(frozen=True)
class TensorSchema:
    """Conditions on one tensor.

    Attributes:
        dtypes: Accepted element types, the default one first; or a `Floats` that depends on kind and run.
        shape: Expected shape, with `ROWS` for the row axis; None for any shape.
        low: Smallest value, inclusive; None for no bound. Floats must always be finite.
        high: Upper bound, exclusive; None for no bound.
        above: Lower bound, exclusive; None for no bound.
        unique: Whether values must be unique.
        row_sums: Smallest and largest sum of a row; None for no bound.
        quantized: Whether the elements are quantized by channel.
        what: Description of a value, for error messages.
        channels: Number of channels of a flat feature column; None to use its second axis.
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
        """Accepted element types of a tensor on the wire."""
        assert not isinstance(self.dtypes, Floats)
        return self.dtypes

    @property
    def nbytes(self) -> int:
        """Size of a tensor on the wire in bytes, with its default type."""
        assert self.shape is not None
        return math.prod(self.shape) * self.types[0].itemsize

    def on_the_wire(self, floats: np.dtype) -> dict[str, TensorSchema]:
        """Returns the tensors that represent this one on the wire, by suffix of their paths.

        Args:
            floats: Element type of the kind, or the run's knowledge type.
        """
        if not isinstance(self.dtypes, Floats):
            return {"": self}
        if self.dtypes is FEATURES and self.shape is not None and is_quantized(floats, self.shape[1:]):
            return self._quantized(self.shape)
        return {"": replace(self, dtypes=(float_type(floats),))}

    def _quantized(self, shape: tuple[int, ...]) -> dict[str, TensorSchema]:
        """Returns the tensors of a quantized column; the bounds of its scales make every decoded number finite."""
        too_large, too_long = (float(np.nextafter(np.float32(most), np.inf)) for most in (LARGEST, MAX_SCALE))
        scales = shape[1:2] if self.channels is None else (self.channels,)
        return {
            "": replace(self, dtypes=(UINT8,), quantized=True),
            "/step": TensorSchema((FLOAT32,), scales, low=0, high=too_long, what="step"),
            "/minimum": TensorSchema((FLOAT32,), scales, low=-LARGEST, high=too_large, what="minimum"),
        }


Tensors = Mapping[str, TensorSchema]
"""Schemas of a part's tensors, by path within the part."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""
