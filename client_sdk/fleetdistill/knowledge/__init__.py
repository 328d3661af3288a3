"""The contents of asks and answers: one frozen dataclass per kind of part, with NumPy arrays.

The classes have the fields of the messages in `protos/fleetdistill/wire/v1/knowledge.proto`, which documents shapes,
types and limits; `fleetdistill.wire.codec` converts between both. A class also defines which columns it can contain,
its number type on the wire, the valid shapes of its tensors and its description in tables. Shapes use N rows, P proxy
samples, M generated samples, C classes and F features. Does not import torch, because the front uses these classes.
"""

from fleetdistill.knowledge.models import (
    Discriminator,
    DistillationGradient,
    Generator,
    ModelParameters,
    NamedTensors,
    NetworkFile,
    Weights,
)
from fleetdistill.knowledge.reports import ClassCount, Metric, Metrics, Plan, PlanValue
from fleetdistill.knowledge.samples import (
    EMBEDDING,
    LOGITS,
    PROBABILITIES,
    ProxyKnowledge,
    ProxySet,
    RefinedKnowledge,
    SampleKnowledge,
    WeightedPredictions,
    check_rows,
    rows_by_id,
)
from fleetdistill.knowledge.secure import SecureEntry, SecureMessage
from fleetdistill.knowledge.statistics import (
    ClassSpace,
    ClassSums,
    HeadGradient,
    LinearHead,
    PrivateRows,
    SharedStatistics,
)
from fleetdistill.wire.kind import KINDS, Array, Kind, Parts, kind_of

__all__ = [
    "CUT",
    "DELIVER",
    "EMBEDDING",
    "GENERAL",
    "KINDS",
    "LOGITS",
    "OWN",
    "PERSONAL",
    "PROBABILITIES",
    "RECEIVED",
    "RESULT",
    "Array",
    "ClassCount",
    "ClassSpace",
    "ClassSums",
    "Discriminator",
    "DistillationGradient",
    "Generator",
    "HeadGradient",
    "Kind",
    "LinearHead",
    "Metric",
    "Metrics",
    "ModelParameters",
    "NamedTensors",
    "NetworkFile",
    "Parts",
    "Plan",
    "PlanValue",
    "PrivateRows",
    "ProxyKnowledge",
    "ProxySet",
    "RefinedKnowledge",
    "SampleKnowledge",
    "SecureEntry",
    "SecureMessage",
    "SharedStatistics",
    "WeightedPredictions",
    "Weights",
    "check_rows",
    "kind_of",
    "rows_by_id",
]

CUT = "cut"
"""Name of the feature column at a model's cut between extractor and predictor."""
GENERAL = "general"
"""Name of the variant that every method delivers; see `DeviceMethod.variants`."""
PERSONAL = "personal"
"""Name of the variant for the device's own class shares, in methods that have such a variant."""
OWN = "own"
"""Name of the model that the app passed in, in methods whose general variant is another model."""
RECEIVED = "received"
"""Name, in figures, of the fleet's model at the beginning of a round, before the device trains it."""
RESULT = "result"
"""Name, in figures, of the final model of the run."""
DELIVER = "deliver"
"""Step that delivers the final model of a run."""
