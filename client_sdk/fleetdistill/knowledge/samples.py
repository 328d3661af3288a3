"""Kinds of parts about samples: the device's own, those of the proxy set, or generated ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fleetdistill.errors import RefusedError, WireError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Array, Kind, PartSchema, declared_shapes
from fleetdistill.wire.schema import FEATURES, INT32, INT64, KIND, ROWS, Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

EMBEDDING = "embedding"
"""Name of the feature column with the inputs of a model's last layer, for models that provide it."""
LOGITS = 1
PROBABILITIES = 2
_IMPORTANCE_SUMS = (0.0, 1 + 1e-4)
"""Valid row sums of weighted predictions: importance is at most 1, plus rounding."""


@dataclass(frozen=True, kw_only=True)
class SampleKnowledge(Kind):
    """Outputs of a device's model for its own samples.

    Attributes:
        sample_ids: Sample ids `[N]` int64, unique.
        features: Features by cut, each `[N, ...]`.
        logits: Unnormalised scores `[N, C]`, or None.
        labels: Labels `[N]` int32 in `[0, C)`, or None if they do not leave the device.
    """

    wire_name = "sample_knowledge"
    possible_columns = ("features", "logits", "labels")
    wire_type = None
    quantized_features = True
    rows_are_samples = True
    description = "{columns} of own samples"

    sample_ids: Array
    features: Mapping[str, Array] = field(default_factory=dict)
    logits: Array | None = None
    labels: Array | None = None

    def columns(self) -> tuple[str, ...]:
        """See `Kind.columns`."""
        present = {"features": self.features, "logits": self.logits is not None, "labels": self.labels is not None}
        return tuple(column for column, contained in present.items() if contained)

    @classmethod
    def tensors(cls, rows: int, classes: int, features: Shapes, channels: Mapping[str, int]) -> Tensors:
        """Returns the schemas of all possible tensors; `channels` is for columns with only their size declared."""
        columns = {
            f"features/{name}": TensorSchema(FEATURES, (rows, *shape), what="features", channels=channels.get(name))
            for name, shape in features.items()
        }
        return {
            "sample_ids": TensorSchema((INT64,), (rows,), low=0, unique=True, what="sample id"),
            "logits": TensorSchema(KIND, (rows, classes), what="logits"),
            "labels": TensorSchema((INT32,), (rows,), low=0, high=classes, what="label"),
            **columns,
        }

    @classmethod
    def schema(
        cls,
        *,
        rows: int,
        features: Shapes,
        classes: int = 0,
        columns: tuple[str, ...] = ("features",),
        channels: Mapping[str, int] | None = None,
    ) -> PartSchema:
        """Returns the schema of a part.

        Args:
            rows: Number of samples.
            features: Shape of one sample in each feature column.
            classes: Number of classes, for logits.
            columns: Columns besides the ids, a subset of `possible_columns`.
            channels: Channels of feature columns with only their size declared; by default the shape's first axis.
        """
        tensors = cls.tensors(rows, classes, features, channels or {})
        left_out = {"logits", "labels"} - set(columns)
        kept = {path: one for path, one in tensors.items() if path not in left_out}
        return PartSchema(kind=cls, tensors=kept, columns=columns, features=features)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`; includes the feature columns that the ask requests."""
        shapes = {column.name: tuple(column.shape) for column in contract.features}
        asked = {name: of for name, of in shapes.items() if not wanted or f"{part.name}/features/{name}" in wanted}
        cls._require_columns(part, contract, asked)
        return cls.tensors(ROWS, len(contract.classes), asked, {})

    @classmethod
    def _require_columns(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, asked: Shapes) -> None:
        sent, needed = part.sample_knowledge, contract.requirements.columns
        missing = [name for name in ("logits", "labels") if name in needed and not sent.HasField(name)]
        if "features" in needed:
            sent_columns = {column.name for column in sent.features}
            missing += [f"features/{name}" for name in asked if name not in sent_columns]
        if not sent.HasField("sample_ids"):
            missing.append("sample_ids")
        if missing:
            text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
            raise RefusedError(Code.BAD_TENSOR, text, {"tensor": missing[0]})


@dataclass(frozen=True, kw_only=True)
class RefinedKnowledge(Kind):
    """The server's soft targets for a device's own samples; contains no targets if `valid` is False."""

    wire_name = "refined_knowledge"
    wire_type = None

    valid: bool
    sample_ids: Array | None = None
    values: Array | None = None
    scale: int = LOGITS

    @classmethod
    def schema(cls, *, rows: int, classes: int) -> PartSchema:
        """Returns the schema of a part with `rows` samples."""
        tensors = {"sample_ids": TensorSchema((INT64,), (rows,)), "values": TensorSchema(KIND, (rows, classes))}
        return PartSchema(kind=cls, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class ProxyKnowledge(Kind):
    """Outputs of a model for the proxy set, in the order of its samples."""

    wire_name = "proxy_knowledge"
    possible_columns = ("features", "logits")
    wire_type = None
    description = "{columns} of the proxy set"

    valid: bool
    proxy_digest: bytes = b""
    logits: Array | None = None
    embeddings: Array | None = None

    def columns(self) -> tuple[str, ...]:
        """See `Kind.columns`; an embedding is a feature."""
        present = {"features": self.embeddings is not None, "logits": self.logits is not None}
        return tuple(column for column, contained in present.items() if contained)

    @classmethod
    def tensors(cls, samples: int, classes: int, embedding: tuple[int, ...], columns: Collection[str]) -> Tensors:
        """Returns the schemas for the columns `features` and `logits`, with one row per proxy sample."""
        logits = {"logits": TensorSchema(KIND, (samples, classes), what="logits")}
        embeddings = {"embeddings": TensorSchema(KIND, (samples, *embedding), what="embeddings")}
        return {**(logits if "logits" in columns else {}), **(embeddings if "features" in columns else {})}

    @classmethod
    def schema(cls, *, samples: int, classes: int, embedding: tuple[int, ...], columns: tuple[str, ...]) -> PartSchema:
        """Returns the schema of a part; `embedding` is the shape of one sample's embedding."""
        tensors = cls.tensors(samples, classes, embedding, columns)
        features = {EMBEDDING: embedding} if "features" in columns else {}
        return PartSchema(kind=cls, tensors=tensors, columns=columns, features=features)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`; requires exactly the contract's columns."""
        if part.proxy_knowledge.proxy_digest != contract.proxy_digest:
            text = f"part {part.name!r} has the digest of another proxy set; expected the contract's"
            raise RefusedError(Code.CONTRACT_MISMATCH, text)
        widths = {feature.name: tuple(feature.shape) for feature in contract.features}
        columns = {column for column in contract.requirements.columns if column != "features" or EMBEDDING in widths}
        tensors = cls.tensors(contract.proxy_samples, len(contract.classes), widths.get(EMBEDDING, ()), columns)
        sent = {field.name for field, _ in part.proxy_knowledge.ListFields()}
        missing = [name for name in tensors if name not in sent]
        if missing or part.proxy_knowledge.valid != bool(tensors):
            lacking = f"lacks {', '.join(missing)}, which {contract.method} needs"
            text = lacking if missing else f"has valid = {not tensors}, must be {bool(tensors)}"
            details = {"tensor": f"{part.name}/{missing[0]}"} if missing else {}
            raise RefusedError(Code.BAD_TENSOR, f"part {part.name!r} {text}", details)
        return tensors


@dataclass(frozen=True, kw_only=True)
class ProxySet(Kind):
    """Labelled data set that the server and all devices of a run have; see `fleetdistill.training.proxy_set`.

    Attributes:
        name: Name of the data set, chosen by the operator.
        licence: Licence under which devices may store it.
        inputs: Inputs `[P, ...]` float32; row i is proxy sample i.
        labels: Labels `[P]` int32 in `[0, C)`.
    """

    wire_name = "proxy_set"

    name: str
    licence: str
    inputs: Array
    labels: Array


@dataclass(frozen=True, kw_only=True)
class WeightedPredictions(Kind):
    """Soft predictions `[M, C]` for generated samples, weighted by the device's importance."""

    wire_name = "weighted_predictions"
    possible_columns = ("logits",)
    description = "predictions on generated samples"

    noise_seed: int
    values: Array

    @classmethod
    def values_schema(cls, rows: int, classes: int) -> TensorSchema:
        """Returns the schema of `values`."""
        what = "importance-weighted predictions"
        return TensorSchema(KIND, (rows, classes), low=0, row_sums=_IMPORTANCE_SUMS, what=what)

    @classmethod
    def schema(cls, *, rows: int, classes: int) -> PartSchema:
        """Returns the schema of a part with `rows` generated samples, which the contract declares."""
        tensors = {"values": cls.values_schema(rows, classes)}
        return PartSchema(
            kind=cls, tensors=tensors, columns=cls.possible_columns or (), declared={"values": (rows, classes)}
        )

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """See `Kind.expected`."""
        if not part.weighted_predictions.HasField("values"):
            raise RefusedError(Code.BAD_TENSOR, f"part {part.name!r} lacks values", {"tensor": f"{part.name}/values"})
        rows, classes = declared_shapes(part, contract).get("values", (ROWS, len(contract.classes)))
        return {"values": cls.values_schema(rows, classes)}


def check_rows(sample_ids: Array, values: Array, shape: tuple[int, ...]) -> None:
    """Raises WireError unless ids are integers `[N]` and values `[N, *shape]`; the server may be hostile."""
    expected = (sample_ids.size, *shape)
    if sample_ids.ndim != 1 or sample_ids.dtype.kind != "i" or values.shape != expected:
        text = f"{sample_ids.dtype} ids {list(sample_ids.shape)} and values {list(values.shape)}"
        raise WireError(f"the server sent {text}, expected integers [N] and [N, {', '.join(map(str, shape))}]")


def rows_by_id(known_ids: Array, wanted_ids: Array) -> tuple[Array, Array]:
    """Matches rows by sample id.

    Args:
        known_ids: `[N]` int64, unique.
        wanted_ids: `[K]` int64.

    Returns:
        `(known_rows, wanted_rows)`, int64 of equal length: pairs of rows with equal ids, in the order of `wanted_ids`.
        Unknown ids are omitted.
    """
    order = np.argsort(known_ids, kind="stable")
    at = np.searchsorted(known_ids, wanted_ids, sorter=order)
    candidates = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(wanted_ids), np.int64)
    result = known_ids[candidates] == wanted_ids if len(order) else np.zeros(len(wanted_ids), bool)
    return candidates[result], np.flatnonzero(result)
