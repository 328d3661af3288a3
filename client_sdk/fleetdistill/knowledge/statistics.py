"""Kinds about classes: statistics that a device sends, and the space that the server makes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.directions import LEAST_ROWS_PER_DIRECTION, most_directions
from fleetdistill.wire.kind import Array, Kind, PartData, declared_of, declared_shapes
from fleetdistill.wire.schema import FLOAT64, INT8, INT32, INT64, KIND, PartSchema, Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

_LEAST_INT8 = -127
"""Steps are taken to both sides alike, so -128 stands for nothing."""


class _Statistics(Kind):
    """What both kinds of class statistics have in common."""

    tells = ("features", "counts")
    words = "class moments and counts"

    @classmethod
    def check_labels(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> Sequence[int]:
        """The classes that a part is about, each one of the contract's and there once."""
        labels: Sequence[int] = getattr(part, cls.wire_name).labels
        wrong = [label for label in labels if label >= len(contract.classes)]
        if wrong or len(set(labels)) != len(labels):
            what = f"class {wrong[0]} outside [0, {len(contract.classes)})" if wrong else "a class twice"
            raise RefusedError(Code.BAD_VALUE, f"part {part.name!r} has {what}")
        return labels

    @classmethod
    def require(cls, part: knowledge_pb2.Part, names: Iterable[str], contract: contract_pb2.Contract) -> None:
        """Refuses a part that lacks one of these tensors."""
        sent = getattr(part, cls.wire_name)
        if missing := [name for name in names if not sent.HasField(name)]:
            text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
            raise RefusedError(Code.BAD_TENSOR, text, {"tensor": f"{part.name}/{missing[0]}"})

    @staticmethod
    def counts_schema(classes: int, least_samples: int) -> TensorSchema:
        """Samples of each class."""
        return TensorSchema((INT32,), (classes,), low=max(least_samples, 1), what="count")

    @staticmethod
    def declared_counts(part: knowledge_pb2.Part, data: PartData, samples: int | None) -> np.ndarray[Any, Any]:
        """Samples of each class in int64; they may not be more than the device has declared."""
        counts = data.array("counts").astype(np.int64)
        if samples is not None and counts.sum() > samples:
            path = f"{part.name}/counts"
            text = f"{path} sum to {counts.sum()}, the device has declared {samples} samples"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})
        return counts

    @staticmethod
    def rows_per_direction(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> int:
        """As declared; contracts of earlier versions do not say."""
        return declared_of(part, contract).rows_per_direction or LEAST_ROWS_PER_DIRECTION


@dataclass(frozen=True, kw_only=True)
class ClassStatistics(_Statistics):
    """Low-rank Gaussians of features by class. None where there is no class.

    See `fleetdistill.methods.classstats.gaussians`.

    Attributes:
        labels: The K classes, unique.
        counts: `[K]` int32, samples behind each.
        means: `[K, F]`.
        directions: `[K, r, F]`, or None for r = 0.
        variances: `[K, F]`, at least 0.
    """

    wire_name = "class_statistics"
    travels_in = None

    labels: list[int]
    counts: Array | None = None
    means: Array | None = None
    directions: Array | None = None
    variances: Array | None = None

    @classmethod
    def tensors(cls, classes: int, of_one: Shapes, least_samples: int) -> Tensors:
        """Those of so many classes, of the shapes that there are of one class."""
        floats = {name: TensorSchema(KIND, (classes, *shape), what=name) for name, shape in of_one.items()}
        if "variances" in floats:
            floats["variances"] = replace(floats["variances"], low=0, what="variance")
        return {"counts": cls.counts_schema(classes, least_samples), **floats}

    @classmethod
    def schema(
        cls, *, classes: int, of_one: Shapes, features: Shapes, least_samples: int, rows_per_direction: int
    ) -> PartSchema:
        """The part about so many classes.

        Args:
            classes: That a device has.
            of_one: What there is of one class: `means`, and `directions` and `variances` unless these stay behind.
            features: The feature column that it is made of.
            least_samples: Samples that a class must have.
            rows_per_direction: Samples that there must be for each direction.
        """
        return PartSchema(
            kind=cls,
            tensors=cls.tensors(classes, of_one, least_samples),
            columns=cls.tells or (),
            features=features,
            declared=of_one,
            least_samples=least_samples,
            rows_per_direction=rows_per_direction,
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """The contract declares what there is of one class; how many classes a device has is its own affair."""
        labels = cls.check_labels(part, contract)
        if not labels:  # then no tensor may be there either
            return {}
        of_one = declared_shapes(part, contract)
        cls.require(part, ("counts", *of_one), contract)
        return cls.tensors(len(labels), of_one, declared_of(part, contract).least_samples)

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """More samples than there are, more directions than the samples of a class allow."""
        if not part.class_statistics.labels:
            return
        counts = cls.declared_counts(part, data, samples)
        if "directions" in data:
            cls._check_directions(part, counts, cls.rows_per_direction(part, contract), data)

    @staticmethod
    def _check_directions(
        part: knowledge_pb2.Part, counts: np.ndarray[Any, Any], rows_per_direction: int, data: PartData
    ) -> None:
        for row, count in enumerate(counts.tolist()):
            found = data.array("directions", row)
            most = most_directions(len(found), count, rows_per_direction)
            if found[most:].any():
                path = f"{part.name}/directions"
                text = f"{count} samples allow {most} directions, row {row} of {path} has more"
                raise RefusedError(Code.BAD_VALUE, text, {"tensor": path, "row": str(row)})


@dataclass(frozen=True, kw_only=True)
class SharedStatistics(_Statistics):
    """Class means and one covariance within classes that all share.

    See `fleetdistill.methods.classstats.shared_statistics`. None of the arrays is there where there is no class.

    Attributes:
        labels: The K classes, unique.
        counts: `[K]` int32, samples behind each.
        means: `[K, D]`.
        directions: `[r, D]` int8, rows of the covariance's factor in steps of their own; None for r = 0.
        steps: `[r]`, the size of a row's step, above 0.
        variances: `[D]`, at least 0: what the directions leave of each number's variance.
        df: `[]` int32, degrees of freedom behind the covariance.
    """

    wire_name = "shared_statistics"
    travels_in = np.dtype(np.float16)

    labels: list[int]
    counts: Array | None = None
    means: Array | None = None
    directions: Array | None = None
    steps: Array | None = None
    variances: Array | None = None
    df: Array | None = None

    @classmethod
    def tensors(cls, classes: int, of_one: Shapes, least_samples: int, directions: int) -> Tensors:
        """Those of so many classes and directions, of the shapes of one class's `means` and `variances`."""
        means, variances = of_one.get("means", ()), of_one.get("variances", ())
        spread = {
            "directions": TensorSchema((INT8,), (directions, *variances), low=_LEAST_INT8, what="direction"),
            "steps": TensorSchema(KIND, (directions,), above=0, what="step"),
        }
        return {
            "counts": cls.counts_schema(classes, least_samples),
            "means": TensorSchema(KIND, (classes, *means), what="means"),
            "variances": TensorSchema(KIND, variances, low=0, what="variance"),
            "df": TensorSchema((INT32,), (), low=0, what="degrees of freedom"),
            **(spread if directions else {}),
        }

    @classmethod
    def schema(
        cls,
        *,
        classes: int,
        dimensions: int,
        directions: int,
        features: Shapes,
        least_samples: int,
        most_rows: int,
        rows_per_direction: int,
    ) -> PartSchema:
        """The part about so many classes.

        Args:
            classes: That a device has.
            dimensions: Numbers of one class's mean.
            directions: Rows of the covariance's factor that a device sends.
            features: The feature column that it is made of, where the run's models give it.
            least_samples: Samples that a class must have.
            most_rows: The most directions that any device may send.
            rows_per_direction: Degrees of freedom that there must be for each direction.
        """
        of_one = {"means": (dimensions,), "variances": (dimensions,)}
        return PartSchema(
            kind=cls,
            tensors=cls.tensors(classes, of_one, least_samples, directions),
            columns=cls.tells or (),
            features=features,
            declared=of_one,
            least_samples=least_samples,
            most_rows=most_rows,
            rows_per_direction=rows_per_direction,
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """As of `ClassStatistics`, but one covariance for all classes."""
        labels = cls.check_labels(part, contract)
        if not labels:  # then no tensor may be there either
            return {}
        cls.require(part, ("counts", "means", "variances", "df"), contract)
        directions, declared = cls._sent_directions(part, contract), declared_of(part, contract)
        return cls.tensors(len(labels), declared_shapes(part, contract), declared.least_samples, directions)

    @classmethod
    def _sent_directions(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> int:
        """Directions and their steps, of which there are as many; both or neither."""
        sent = part.shared_statistics
        if not sent.HasField("directions") and not sent.HasField("steps"):
            return 0
        cls.require(part, ("directions", "steps"), contract)
        rows = sent.directions.shape[0] if sent.directions.shape else 0
        most = declared_of(part, contract).most_rows
        if not 1 <= rows <= most:
            path, expected = f"{part.name}/directions", f"at most {most}" if rows else "at least 1 if it is there"
            raise RefusedError(Code.BAD_TENSOR, f"{path} has {rows} rows, expected {expected}", {"tensor": path})
        return rows

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """Samples beyond the declared, degrees of freedom that counts do not give, more directions than these allow."""
        if not part.shared_statistics.labels:
            return
        counts = cls.declared_counts(part, data, samples)
        df, expected = int(data.array("df")), int(counts.sum()) - len(counts)
        if df != expected:
            path = f"{part.name}/df"
            text = f"{path} is {df}, {counts.sum()} samples of {len(counts)} classes have {expected}"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})
        rows, most = part.shared_statistics.directions.shape, df // cls.rows_per_direction(part, contract)
        if "directions" in data and rows[0] > most:
            path = f"{part.name}/directions"
            text = f"{path} has {rows[0]} rows, {df} degrees of freedom allow {most}"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})


@dataclass(frozen=True, kw_only=True)
class ClassSpace(Kind):
    """The fleet's classes in the directions that tell them apart; see `fleetdistill.methods.classstats.class_space`.

    Attributes:
        labels: The K classes, ascending.
        counts: `[K]` int32, samples behind each.
        directions: `[D, q]`.
        origin: `[q]`.
        centres: `[K, q]`, the classes' means.
        df: `[]` int64, degrees of freedom behind the covariance.
        shrinkage: `[]` float64, share of the diagonal in it.
        outside: `[]` float64, mean squared distance of a row from its class in the directions that are not here.
    """

    wire_name = "class_space"
    travels_in = np.dtype(np.float16)
    exact = frozenset({"shrinkage", "outside"})

    labels: list[int]
    counts: Array
    directions: Array
    origin: Array
    centres: Array
    df: Array
    shrinkage: Array
    outside: Array

    @classmethod
    def schema(cls, *, classes: int, dimensions: int, directions: int) -> PartSchema:
        """The part about so many classes of a space of so many directions."""
        tensors = {
            "counts": TensorSchema((INT32,), (classes,)),
            "directions": TensorSchema(KIND, (dimensions, directions)),
            "origin": TensorSchema(KIND, (directions,)),
            "centres": TensorSchema(KIND, (classes, directions)),
            "df": TensorSchema((INT64,), ()),
            **{name: TensorSchema((FLOAT64,), ()) for name in sorted(cls.exact)},
        }
        return PartSchema(kind=cls, tensors=tensors)
