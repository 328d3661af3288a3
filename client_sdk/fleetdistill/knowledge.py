"""What asks and answers carry: one frozen class for each kind of part, holding numpy arrays.

The classes mirror the messages of `protos/fleetdistill/wire/v1/knowledge.proto` field by field, where shapes, types
and limits are written down; `fleetdistill.wire.codec` maps one to the other. Each says what it tells about a device and
in which number type it travels, so that neither gate nor codec knows it by name. Shapes use N rows, P proxy samples,
M generated samples, C classes and F feature numbers. No torch here: the front handles these classes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fleetdistill.errors import WireError

Array = NDArray[Any]
PlanValue = int | float | bool | str | list[int]

_FLOAT16 = np.dtype(np.float16)

EMBEDDING = "embedding"
"""Name of the feature column that enters a model's last layer, for models that offer it."""

CUT = "cut"
"""Name of the feature column of a model's one cut between extractor and predictor."""
GENERAL = "general"
"""Name of the local model among the answers that an app has of a device; see `DeviceMethod.answers`."""
PERSONAL = "personal"
"""Name of an answer for the device's own mix of classes, of methods that give one beside the general one."""
OWN = "own"
"""Name of the model that the app gave, of methods that make the general answer apart from it."""
RECEIVED = "received"
"""Name, in figures, of the fleet's model as the round before made it: what the device has before it trains."""
RESULT = "result"
"""Name, in figures, of the run's end result on the device."""
DELIVER = "deliver"
"""Step that brings a run's end result; the app's model is then replaced, unless its validation figure would fall."""


class PartKind:
    """What a kind of part says of itself.

    Attributes:
        tells: Columns that it may hold of a device, which the app must allow; None for what never leaves a device.
        travels_in: Number type of its floats on the wire; None for the run's knowledge type.
        exact: Names of fields whose floats travel in float64.
    """

    tells: ClassVar[tuple[str, ...] | None] = None
    travels_in: ClassVar[np.dtype[Any] | None] = np.dtype(np.float32)
    exact: ClassVar[frozenset[str]] = frozenset()

    def columns(self) -> tuple[str, ...]:
        """Those of `tells` that this part holds."""
        return self.tells or ()


@dataclass(frozen=True, kw_only=True)
class ModelParameters(PartKind):
    """Parameters and buffers of a model, or of the part of it that `scope` names."""

    tells = ("parameters",)

    parameters: Mapping[str, Array]
    buffers: Mapping[str, Array] = field(default_factory=dict)
    scope: str = "model"


@dataclass(frozen=True, kw_only=True)
class SampleKnowledge(PartKind):
    """What a device's model says about its own samples.

    Attributes:
        sample_ids: `[N]` int64, unique.
        features: Columns by cut, each `[N, ...]`.
        logits: `[N, C]` unnormalised scores, or None.
        labels: `[N]` int32 in `[0, C)`, or None where they do not leave the device.
    """

    tells = ("features", "logits", "labels")
    travels_in = None

    sample_ids: Array
    features: Mapping[str, Array] = field(default_factory=dict)
    logits: Array | None = None
    labels: Array | None = None

    def columns(self) -> tuple[str, ...]:
        """As `PartKind`'s."""
        there = {"features": self.features, "logits": self.logits is not None, "labels": self.labels is not None}
        return tuple(column for column, held in there.items() if held)


LOGITS = 1
PROBABILITIES = 2


@dataclass(frozen=True, kw_only=True)
class RefinedKnowledge(PartKind):
    """What the server says about a device's own samples; `valid` False means that there is nothing to learn from."""

    travels_in = None

    valid: bool
    sample_ids: Array | None = None
    values: Array | None = None
    scale: int = LOGITS


@dataclass(frozen=True, kw_only=True)
class ProxyKnowledge(PartKind):
    """What a model says about the proxy set, in its order."""

    tells = ("features", "logits")
    travels_in = None

    valid: bool
    proxy_digest: bytes = b""
    logits: Array | None = None
    embeddings: Array | None = None

    def columns(self) -> tuple[str, ...]:
        """As `PartKind`'s; an embedding is a feature."""
        there = {"features": self.embeddings is not None, "logits": self.logits is not None}
        return tuple(column for column, held in there.items() if held)


@dataclass(frozen=True, kw_only=True)
class ProxySet(PartKind):
    """A labelled data set that the server and every device of a run hold; see `fleetdistill.training.proxy_set`.

    Attributes:
        name: What the operator calls it.
        licence: Terms under which devices may keep it.
        inputs: `[P, ...]` float32; row i is proxy sample i.
        labels: `[P]` int32 in `[0, C)`.
    """

    name: str
    licence: str
    inputs: Array
    labels: Array


@dataclass(frozen=True, kw_only=True)
class WeightedPredictions(PartKind):
    """Soft predictions `[M, C]` on generated samples, weighted by the device's importance."""

    tells = ("logits",)

    noise_seed: int
    values: Array


@dataclass(frozen=True, kw_only=True)
class ClassStatistics(PartKind):
    """Low-rank Gaussians of features by class. None where there is no class.

    See `fleetdistill.methods.classstats.gaussians`.

    Attributes:
        labels: The K classes, unique.
        counts: `[K]` int32, samples behind each.
        means: `[K, F]`.
        directions: `[K, r, F]`, or None for r = 0.
        variances: `[K, F]`, at least 0.
    """

    tells = ("features", "counts")
    travels_in = None

    labels: list[int]
    counts: Array | None = None
    means: Array | None = None
    directions: Array | None = None
    variances: Array | None = None


@dataclass(frozen=True, kw_only=True)
class SharedStatistics(PartKind):
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

    tells = ("features", "counts")
    travels_in = _FLOAT16

    labels: list[int]
    counts: Array | None = None
    means: Array | None = None
    directions: Array | None = None
    steps: Array | None = None
    variances: Array | None = None
    df: Array | None = None


@dataclass(frozen=True, kw_only=True)
class ClassSpace(PartKind):
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

    travels_in = _FLOAT16
    exact = frozenset({"shrinkage", "outside"})

    labels: list[int]
    counts: Array
    directions: Array
    origin: Array
    centres: Array
    df: Array
    shrinkage: Array
    outside: Array


@dataclass(frozen=True, kw_only=True)
class NetworkFile(PartKind):
    """A network as an ONNX file, `[n]` uint8, for devices without PyTorch; see `fleetdistill.light.light`."""

    onnx: Array


@dataclass(frozen=True, kw_only=True)
class SoftPredictions(PartKind):
    """Soft predictions `[M, C]` on rows of features that are drawn from class statistics."""

    tells = ("logits",)
    travels_in = None

    noise_seed: int
    values: Array


@dataclass(frozen=True, kw_only=True)
class DistillationGradient(PartKind):
    """Gradient of a distillation loss by parameter name, with the batch size behind it.

    `loss` is the mean (nats) over rows that are the same in all steps of a round, for a server that compares steps.
    """

    tells = ("gradients",)

    gradients: Mapping[str, Array]
    batch_size: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Generator(PartKind):
    """A generator of samples or features from noise vectors of `noise_size` numbers."""

    tells = ("parameters",)

    parameters: ModelParameters
    noise_size: int


@dataclass(frozen=True, kw_only=True)
class Discriminator(PartKind):
    """A discriminator, or only its head when it shares the classifier's extractor."""

    tells = ("parameters",)

    parameters: ModelParameters
    shares_extractor: bool


@dataclass(frozen=True, kw_only=True)
class Plan(PartKind):
    """A method's typed scalars, such as its configuration, a cut layer or a count."""

    values: Mapping[str, PlanValue]


@dataclass(frozen=True, kw_only=True)
class ClassCount:
    """A metric restricted to the class `label`."""

    label: int
    sum: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure as sum and count, so that figures of several devices add up; the rate is `sum / count`."""

    name: str
    split: str
    sum: float
    count: int
    by_class: list[ClassCount] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Metrics(PartKind):
    """Figures that a device reports about itself."""

    tells = ("metrics",)

    metrics: list[Metric]


Kind = (
    ModelParameters
    | SampleKnowledge
    | RefinedKnowledge
    | ProxyKnowledge
    | ProxySet
    | WeightedPredictions
    | ClassStatistics
    | SharedStatistics
    | ClassSpace
    | NetworkFile
    | SoftPredictions
    | DistillationGradient
    | Generator
    | Discriminator
    | Plan
    | Metrics
)
Parts = Mapping[str, Kind]


def check_rows(sample_ids: Array, values: Array, shape: tuple[int, ...]) -> None:
    """Raises WireError unless each of N ids `[N]` has a row of values `[N, *shape]`; a server may be hostile."""
    expected = (sample_ids.size, *shape)
    if sample_ids.ndim != 1 or sample_ids.dtype.kind != "i" or values.shape != expected:
        text = f"{sample_ids.dtype} ids {list(sample_ids.shape)} and values {list(values.shape)}"
        raise WireError(f"the server sent {text}, expected integers [N] and [N, {', '.join(map(str, shape))}]")


def rows_by_id(known_ids: Array, wanted_ids: Array) -> tuple[Array, Array]:
    """Finds wanted samples among known ones; rows are matched by id, never by position.

    Args:
        known_ids: `[N]` int64, unique.
        wanted_ids: `[K]` int64.

    Returns:
        `(known_rows, wanted_rows)`, both int64 of one length: row pairs with equal ids, in the order of
        `wanted_ids`. Ids that are not known are left out.
    """
    order = np.argsort(known_ids, kind="stable")
    at = np.searchsorted(known_ids, wanted_ids, sorter=order)
    candidates = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(wanted_ids), np.int64)
    found = known_ids[candidates] == wanted_ids if len(order) else np.zeros(len(wanted_ids), bool)
    return candidates[found], np.flatnonzero(found)
