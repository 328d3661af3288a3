"""What asks and answers carry: one frozen class for each kind of part, holding numpy arrays.

The classes mirror the messages of `protos/fleetdistill/wire/v1/knowledge.proto` field by field, where shapes, types
and limits are written down; `fleetdistill.wire.codec` maps one to the other. A class says what it tells about a device,
in which number type it travels, what its tensors must be and how it is called in tables, so that nothing else knows it
by name. Shapes use N rows, P proxy samples, M generated samples, C classes and F feature numbers. No torch here: the
front handles these classes too.
"""

from fleetdistill.knowledge.models import (
    Discriminator,
    DistillationGradient,
    Generator,
    ModelParameters,
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
    SoftPredictions,
    WeightedPredictions,
    check_rows,
    rows_by_id,
)
from fleetdistill.knowledge.statistics import ClassSpace, ClassStatistics, SharedStatistics
from fleetdistill.wire.kind import KINDS, Array, Kind, Parts

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
    "ClassStatistics",
    "Discriminator",
    "DistillationGradient",
    "Generator",
    "Kind",
    "Metric",
    "Metrics",
    "ModelParameters",
    "NetworkFile",
    "Parts",
    "Plan",
    "PlanValue",
    "ProxyKnowledge",
    "ProxySet",
    "RefinedKnowledge",
    "SampleKnowledge",
    "SharedStatistics",
    "SoftPredictions",
    "WeightedPredictions",
    "Weights",
    "check_rows",
    "rows_by_id",
]

CUT = "cut"
"""Name of the feature column of a model's one cut between extractor and predictor."""
GENERAL = "general"
"""Name of the local model among the variants that an app has of a device; see `DeviceMethod.variants`."""
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
