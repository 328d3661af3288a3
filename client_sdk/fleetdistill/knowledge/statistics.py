"""Kinds of parts about classes: statistics or noisy sums from a device, and the server's class space."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Array, Kind, PartData, PartSchema, declared_of, declared_shapes
from fleetdistill.wire.schema import FLOAT64, INT8, INT32, INT64, KIND, Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

MIN_ROWS_PER_DIRECTION = 2
"""Smallest number of samples per direction that a configuration can set."""
_MIN_INT8 = -127
"""Smallest quantized value; the range is symmetric, so -128 is not used."""


@dataclass(frozen=True, kw_only=True)
class SharedStatistics(Kind):
    """Class means and a within-class covariance; see `fleetdistill.methods.classstats.shared_statistics`.

    All arrays are None if there is no class.

    Attributes:
        labels: Labels of the K classes, unique.
        counts: Samples of each class, `[K]` int32.
        means: Means `[K, D]`.
        directions: Quantized rows of the covariance factor, `[r, D]` int8; None for r = 0.
        steps: Quantization step of each row, `[r]`, above 0.
        variances: Residual variances `[D]`, at least 0.
        df: Degrees of freedom of the covariance, `[]` int32.
    """

    wire_name = "shared_statistics"
    wire_type = np.dtype(np.float16)
    possible_columns = ("class_statistics", "counts")
    description = "class moments and counts"

    labels: list[int]
    counts: Array | None = None
    means: Array | None = None
    directions: Array | None = None
    steps: Array | None = None
    variances: Array | None = None
    df: Array | None = None

    @classmethod
    def tensors(cls, classes: int, of_one: Shapes, min_samples: int, directions: int) -> Tensors:
        """Returns the schemas of all tensors; `of_one` has the shapes of one class's `means` and `variances`."""
        means, variances = of_one.get("means", ()), of_one.get("variances", ())
        spread = {
            "directions": TensorSchema((INT8,), (directions, *variances), low=_MIN_INT8, what="direction"),
            "steps": TensorSchema(KIND, (directions,), above=0, what="step"),
        }
        return {
            "counts": cls.counts_schema(classes, min_samples),
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
        min_samples: int,
        max_rows: int,
        rows_per_direction: int,
    ) -> PartSchema:
        """Returns the schema of a part.

        Args:
            classes: Number of classes that a device has.
            dimensions: Dimension D of a mean.
            directions: Number of rows of the covariance factor that a device sends.
            features: Feature column that the statistics are computed from, if the run's models have it.
            min_samples: Minimum number of samples of a class.
            max_rows: Maximum number of directions of any device.
            rows_per_direction: Minimum number of degrees of freedom per direction.
        """
        of_one = {"means": (dimensions,), "variances": (dimensions,)}
        return PartSchema(
            kind=cls,
            tensors=cls.tensors(classes, of_one, min_samples, directions),
            columns=cls.possible_columns or (),
            features=features,
            declared=of_one,
            min_samples=min_samples,
            max_rows=max_rows,
            rows_per_direction=rows_per_direction,
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`. The contract declares the shapes of one class; the part gives the number of classes."""
        labels = cls.check_labels(part, contract)
        if not labels:  # without classes there must be no tensors
            return {}
        cls.require(part, ("counts", "means", "variances", "df"), contract)
        directions, declared = cls._sent_directions(part, contract), declared_of(part, contract)
        return cls.tensors(len(labels), declared_shapes(part, contract), declared.min_samples, directions)

    @classmethod
    def _sent_directions(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> int:
        """Returns the number of directions. Raises RefusedError if directions and steps are not both present."""
        sent = part.shared_statistics
        if not sent.HasField("directions") and not sent.HasField("steps"):
            return 0
        cls.require(part, ("directions", "steps"), contract)
        rows = sent.directions.shape[0] if sent.directions.shape else 0
        most = declared_of(part, contract).max_rows
        if not 1 <= rows <= most:
            path, expected = (
                f"{part.name}/directions",
                f"at most {most}" if rows else "at least 1 if the tensor is present",
            )
            raise RefusedError(Code.BAD_TENSOR, f"{path} has {rows} rows, expected {expected}", {"tensor": path})
        return rows

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """Checks the number of samples, the degrees of freedom and the number of directions."""
        if not part.shared_statistics.labels:
            return
        counts = cls.declared_counts(part, data, samples)
        df, expected = int(data.array("df")), int(counts.sum()) - len(counts)
        if df != expected:
            path = f"{part.name}/df"
            text = f"{path} is {df}, must be {expected} for {counts.sum()} samples of {len(counts)} classes"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})
        rows, most = part.shared_statistics.directions.shape, df // cls.rows_per_direction(part, contract)
        if "directions" in data and rows[0] > most:
            path = f"{part.name}/directions"
            text = f"{path} has {rows[0]} rows, must be at most {most} for {df} degrees of freedom"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})

    @classmethod
    def check_labels(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> Sequence[int]:
        """Returns the classes of a part. Raises RefusedError if one is unknown or occurs twice."""
        labels: Sequence[int] = part.shared_statistics.labels
        wrong = [label for label in labels if label >= len(contract.classes)]
        if wrong or len(set(labels)) != len(labels):
            what = f"class {wrong[0]} outside [0, {len(contract.classes)})" if wrong else "a duplicate class"
            raise RefusedError(Code.BAD_VALUE, f"part {part.name!r} has {what}")
        return labels

    @classmethod
    def require(cls, part: knowledge_pb2.Part, names: Iterable[str], contract: contract_pb2.Contract) -> None:
        """Raises RefusedError if one of these tensors is missing."""
        sent: Any = part.shared_statistics
        if missing := [name for name in names if not sent.HasField(name)]:
            text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
            raise RefusedError(Code.BAD_TENSOR, text, {"tensor": f"{part.name}/{missing[0]}"})

    @staticmethod
    def counts_schema(classes: int, min_samples: int) -> TensorSchema:
        """Returns the schema of the tensor with the number of samples per class."""
        return TensorSchema((INT32,), (classes,), low=max(min_samples, 1), what="count")

    @staticmethod
    def declared_counts(part: knowledge_pb2.Part, data: PartData, samples: int | None) -> np.ndarray[Any, Any]:
        """Returns the samples per class, int64. Raises RefusedError if there are more than the device declared."""
        counts = data.array("counts").astype(np.int64)
        if samples is not None and counts.sum() > samples:
            path = f"{part.name}/counts"
            text = f"{path} sum to {counts.sum()}, but the device declared {samples} samples"
            raise RefusedError(Code.BAD_VALUE, text, {"tensor": path})
        return counts

    @staticmethod
    def rows_per_direction(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> int:
        """Returns the contract's rows per direction, or the default for older contracts, which do not declare it."""
        return declared_of(part, contract).rows_per_direction or MIN_ROWS_PER_DIRECTION


@dataclass(frozen=True, kw_only=True)
class ClassSpace(Kind):
    """The fleet's classes in their discriminative directions; see `fleetdistill.methods.classstats.class_space`.

    Attributes:
        labels: Labels of the K classes, ascending.
        counts: Samples of each class, `[K]` int32.
        directions: Discriminative directions `[D, q]`.
        origin: Coordinates of the origin `[q]`.
        centres: Coordinates of the class means `[K, q]`.
        df: Degrees of freedom of the covariance, `[]` int64.
        shrinkage: Weight of the diagonal in the covariance, `[]` float64 in `[0, 1]`.
        outside: Mean squared distance of a row from its class mean outside of the directions, `[]` float64.
        leverage: Mean share of a row in its own logits if this is the space of a refined head: then `centres` are no
            class means, but give the head's logits. Else 0.
    """

    wire_name = "class_space"
    wire_type = np.dtype(np.float16)
    exact = frozenset({"shrinkage", "outside"})

    labels: list[int]
    counts: Array
    directions: Array
    origin: Array
    centres: Array
    df: Array
    shrinkage: Array
    outside: Array
    leverage: float = 0.0

    @property
    def is_refined(self) -> bool:
        """Whether this is the space of a refined head."""
        return self.leverage > 0

    @classmethod
    def schema(cls, *, classes: int, dimensions: int, directions: int) -> PartSchema:
        """Returns the schema of a part."""
        tensors = {
            "counts": TensorSchema((INT32,), (classes,)),
            "directions": TensorSchema(KIND, (dimensions, directions)),
            "origin": TensorSchema(KIND, (directions,)),
            "centres": TensorSchema(KIND, (classes, directions)),
            "df": TensorSchema((INT64,), ()),
            **{name: TensorSchema((FLOAT64,), ()) for name in sorted(cls.exact)},
        }
        return PartSchema(kind=cls, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class LinearHead(Kind):
    """A softmax head of centred features, at which devices sum their gradients.

    Attributes:
        labels: The K classes, ascending.
        counts: The fleet's samples of each class, `[K]`, at least 1.
        mean: Mean of the fleet's features, `[D]`; it centres them.
        weights: `[K, D + 1]`; the biases are last.
    """

    wire_name = "linear_head"
    wire_type = np.dtype(np.float16)

    labels: Sequence[int]
    counts: Array
    mean: Array
    weights: Array

    @classmethod
    def schema(cls, *, classes: int, dimensions: int) -> PartSchema:
        """Returns the schema of a part."""
        tensors = {
            "counts": TensorSchema((INT32,), (classes,)),
            "mean": TensorSchema(KIND, (dimensions,)),
            "weights": TensorSchema(KIND, (classes, dimensions + 1)),
        }
        return PartSchema(kind=cls, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class HeadGradient(Kind):
    """Sums over a device's samples at a `LinearHead`.

    Attributes:
        gradient: Gradient of the loss by the weights, divided by `scale`, `[C, D + 1]`; 0 for classes that
            the head does not have.
        scale: Above 0.
        loss: Negative log-likelihood of the samples' classes, in nats, at least 0.
        rows: Number of samples, at least 1.
    """

    wire_name = "head_gradient"
    wire_type = np.dtype(np.float16)
    possible_columns = ("gradients",)
    description = "gradient sums over own samples"

    gradient: Array
    scale: float
    loss: float
    rows: int

    @classmethod
    def schema(cls, *, classes: int, dimensions: int) -> PartSchema:
        """Returns the schema of a part; a device sends rows of all C classes."""
        shapes = {"gradient": (classes, dimensions + 1)}
        return PartSchema(kind=cls, tensors=_tensors(shapes), columns=cls.possible_columns or (), declared=shapes)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`; the shape is the contract's, whichever classes the device has."""
        sent, shapes = part.head_gradient, declared_shapes(part, contract)
        if not (math.isfinite(sent.scale) and sent.scale > 0 and math.isfinite(sent.loss) and sent.loss >= 0):
            text = f"part {part.name!r} has scale {sent.scale!r} and loss {sent.loss!r}, must be finite, > 0 and >= 0"
            raise RefusedError(Code.BAD_VALUE, text)
        if not sent.HasField("gradient"):
            text = f"part {part.name!r} lacks gradient, which {contract.method} needs"
            raise RefusedError(Code.BAD_TENSOR, text, {"tensor": f"{part.name}/gradient"})
        return _tensors(shapes)

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """Checks the number of samples."""
        rows = part.head_gradient.rows
        if rows < 1 or (samples is not None and rows > samples):
            text = f"part {part.name!r} is of {rows} samples, must be at least 1"
            raise RefusedError(Code.BAD_VALUE, text if rows < 1 else f"{text} and at most the declared {samples}")


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
