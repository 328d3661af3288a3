"""Kinds of differentially private class statistics: rows that stay on the device, and the noisy sums that it sends."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Array, Kind, PartSchema, declared_shapes
from fleetdistill.wire.schema import KIND, Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2


class PrivateRows(Kind):
    """A device's feature rows and labels, from which the device makes `ClassSums`.

    It has no form on the wire. A device half answers with it, and the device replaces it before the answer is stored,
    so that no method and no app can send sums with too little noise.

    Attributes:
        rows: `[n, F]` float.
        labels: `[n]` integers in `[0, classes)`.
        classes: C, classes of the contract.
    """

    possible_columns = None

    def __init__(self, rows: Array, labels: Array, classes: int) -> None:
        self.rows, self.labels, self.classes = rows, labels, classes


@dataclass(frozen=True, kw_only=True)
class ClassSums(Kind):
    """Sums over a device's unit rows with Gaussian noise; see `fleetdistill.methods.classstats_private.sums`.

    Attributes:
        counts: Noisy number of rows of each class, `[C]`; may be negative.
        sums: Noisy sums of each class's rows, `[C, F]`.
        second_moment: Upper triangle of the noisy sum of u uᵀ over all rows, by rows, `[F (F + 1) / 2]`.
        mu: Gaussian-DP parameter of the noise, above 0.
        discrete: Whether the noise is discrete Gaussian.
    """

    wire_name = "class_sums"
    possible_columns = ("class_statistics", "counts")
    description = "noisy class sums and counts"

    counts: Array
    sums: Array
    second_moment: Array
    mu: float
    discrete: bool

    @classmethod
    def schema(cls, *, classes: int, dimensions: int, features: Shapes) -> PartSchema:
        """Returns the schema of a part.

        Args:
            classes: C.
            dimensions: F, numbers of a row.
            features: Feature column that the rows are computed from, if the run's models have it.
        """
        shapes = {
            "counts": (classes,),
            "sums": (classes, dimensions),
            "second_moment": (dimensions * (dimensions + 1) // 2,),
        }
        return PartSchema(
            kind=cls,
            tensors=_tensors(shapes),
            columns=cls.possible_columns or (),
            features=features,
            declared=shapes,
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`; all shapes are the contract's, whichever classes the device has."""
        sent, shapes = part.class_sums, declared_shapes(part, contract)
        if not (math.isfinite(sent.mu) and sent.mu > 0):
            text = f"part {part.name!r} has mu {sent.mu!r}, must be a finite number above 0"
            raise RefusedError(Code.BAD_VALUE, text)
        there = {field.name for field, _ in sent.ListFields()}
        if missing := [name for name in shapes if name not in there]:
            text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
            raise RefusedError(Code.BAD_TENSOR, text, {"tensor": f"{part.name}/{missing[0]}"})
        return _tensors(shapes)


def _tensors(shapes: Shapes) -> Tensors:
    return {name: TensorSchema(KIND, shape, what=name.replace("_", " ")) for name, shape in shapes.items()}
