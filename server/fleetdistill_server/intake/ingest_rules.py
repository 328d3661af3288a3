"""What each tensor of an upload must be, by the kind of its part; and what is checked of a part that has no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleetdistill.errors import RefusedError
from fleetdistill.knowledge import EMBEDDING
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import float_type, in_channel_steps
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.quantize import LARGEST, LARGEST_STEP
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

ROWS = -1
"""Stands in an expected shape for the number of rows, which is free but the same for all columns of a part."""
MOST_METRICS = 100
"""Each is a row of the store for every answer."""
_MAX_WORD = 64
_MAX_PLAN_BYTES = 64 << 10
_IMPORTANCE_SUMS = (0.0, 1 + 1e-4)
"""An importance is at most 1, and predictions sum to 1 up to rounding."""
_PROBABILITY_SUMS = (1 - 2e-3, 1 + 2e-3)
"""Rounding to float16 changes a number by 2**-11 of it, or by 2**-25 where it is tiny: with 1,000 classes 5.2e-4."""
_FLOAT16 = np.dtype("<f2")
_FLOAT32 = np.dtype("<f4")
_INT8 = np.dtype("i1")
_LEAST_INT8 = -127
"""Steps are taken to both sides alike, so -128 stands for nothing."""
_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_UINT8 = np.dtype("u1")


@dataclass(frozen=True)
class Rule:
    """What one tensor must be.

    Attributes:
        dtypes: Element types that are taken.
        shape: Expected shape with `ROWS` for the row axis; None where any shape fits.
        low: Smallest value, None for no bound. Floats must be finite in any case.
        high: First value that is too large, None for no bound.
        above: Values must be larger than this, None for no bound.
        unique: Values may not repeat.
        row_sums: Least and most that the numbers of a row may sum to, None for no bound.
        in_steps: Whether the elements are steps on the scale of their channel.
        what: The column in words, for messages.
    """

    dtypes: tuple[np.dtype, ...]
    shape: tuple[int, ...] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    unique: bool = False
    row_sums: tuple[float, float] | None = None
    in_steps: bool = False
    what: str = "value"


def rules_of(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str] = ()
) -> dict[str, Rule]:
    """What each tensor of a part must be, by path; a required tensor that is missing is refused here.

    Args:
        part: What was sent.
        contract: What it must fit.
        wanted: Paths of the feature columns that the ask wants; empty for all of the contract's.

    Raises:
        RefusedError: A column that the contract requires is missing.
    """
    kind = part.WhichOneof("kind")
    if kind == "sample_knowledge":
        return _sample_rules(part, contract, wanted)
    make = _RULES.get(kind)
    return make(part, contract) if make else {}


def _sample_rules(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]
) -> dict[str, Rule]:
    knowledge_type = DTYPES[contract.knowledge_type]
    floats = (float_type(knowledge_type),)
    classes = len(contract.classes)
    rules = {
        f"{part.name}/sample_ids": Rule((_INT64,), (ROWS,), low=0, unique=True, what="sample id"),
        f"{part.name}/logits": Rule(floats, (ROWS, classes), what="logits"),
        f"{part.name}/labels": Rule((_INT32,), (ROWS,), low=0, high=classes, what="label"),
    }
    shapes = {f"{part.name}/features/{column.name}": (ROWS, *column.shape) for column in contract.features}
    asked = {path: shape for path, shape in shapes.items() if not wanted or path in wanted}
    for path, shape in asked.items():
        if in_channel_steps(knowledge_type, shape[1:]):
            rules |= _step_rules(path, shape)
        else:
            rules[path] = Rule(floats, shape, what="features")
    _require_columns(part, contract, asked)
    return rules


def _step_rules(path: str, shape: tuple[int, ...]) -> dict[str, Rule]:
    """A column in channel steps: with its scales in these bounds, every number that it stands for is finite."""
    too_large, too_long = (float(np.nextafter(np.float32(most), np.inf)) for most in (LARGEST, LARGEST_STEP))
    return {
        path: Rule((_UINT8,), shape, in_steps=True, what="features"),
        f"{path}/step": Rule((_FLOAT32,), shape[1:2], low=0, high=too_long, what="step"),
        f"{path}/minimum": Rule((_FLOAT32,), shape[1:2], low=-LARGEST, high=too_large, what="minimum"),
    }


def _require_columns(part: knowledge_pb2.Part, contract: contract_pb2.Contract, feature_paths: Collection[str]) -> None:
    sent = part.sample_knowledge
    needed = contract.requirements.columns
    missing = [name for name in ("logits", "labels") if name in needed and not sent.HasField(name)]
    if "features" in needed:
        given = {f"{part.name}/features/{column.name}" for column in sent.features}
        missing += [path.removeprefix(f"{part.name}/") for path in feature_paths if path not in given]
    if not sent.HasField("sample_ids"):
        missing.append("sample_ids")
    if missing:
        text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
        raise RefusedError(Code.BAD_TENSOR, text, {"tensor": missing[0]})


def _proxy_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    if part.proxy_knowledge.proxy_digest != contract.proxy_digest:
        raise RefusedError(Code.CONTRACT_MISMATCH, f"part {part.name!r} is about another proxy set than the contract's")
    floats = (float_type(DTYPES[contract.knowledge_type]),)
    shapes = _proxy_shapes(contract)
    sent = {field.name for field, _ in part.proxy_knowledge.ListFields()}
    missing = [name for name in shapes if name not in sent]
    if missing or part.proxy_knowledge.valid != bool(shapes):
        text = f"part {part.name!r} lacks {', '.join(missing) or 'a true word on being valid'}"
        details = {"tensor": f"{part.name}/{missing[0]}"} if missing else {}
        raise RefusedError(Code.BAD_TENSOR, f"{text}, which {contract.method} needs", details)
    return {f"{part.name}/{name}": Rule(floats, shape, what=name) for name, shape in shapes.items()}


def _proxy_shapes(contract: contract_pb2.Contract) -> dict[str, tuple[int, ...]]:
    """The columns that the contract wants about the proxy set: one row for each of its samples, no others."""
    samples, columns = contract.proxy_samples, contract.requirements.columns
    widths = {one.name: tuple(one.shape) for one in contract.features if one.name == EMBEDDING}
    shapes: dict[str, tuple[int, ...]] = {"logits": (samples, len(contract.classes))} if "logits" in columns else {}
    if "features" in columns and EMBEDDING in widths:
        shapes["embeddings"] = (samples, *widths[EMBEDDING])
    return shapes


def _prediction_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    if not part.weighted_predictions.HasField("values"):
        raise RefusedError(Code.BAD_TENSOR, f"part {part.name!r} lacks values", {"tensor": f"{part.name}/values"})
    shape = _declared(part, contract).get("values", (ROWS, len(contract.classes)))
    rule = Rule((_FLOAT32,), shape, low=0, row_sums=_IMPORTANCE_SUMS, what="importance-weighted predictions")
    return {f"{part.name}/values": rule}


def _soft_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    if not part.soft_predictions.HasField("values"):
        raise RefusedError(Code.BAD_TENSOR, f"part {part.name!r} lacks values", {"tensor": f"{part.name}/values"})
    floats = (float_type(DTYPES[contract.knowledge_type]),)
    rule = Rule(floats, (ROWS, len(contract.classes)), low=0, row_sums=_PROBABILITY_SUMS, what="soft predictions")
    return {f"{part.name}/values": rule}


def _statistics_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    """The contract declares what there is of one class; how many classes a device has is its own affair."""
    labels = _checked_labels(part, part.class_statistics.labels, contract)
    if not labels:  # then no tensor may be there either
        return {}
    declared = {"counts": (), **_declared(part, contract)}
    _require(part, declared, contract)
    floats = (float_type(DTYPES[contract.knowledge_type]),)
    rules = {f"{part.name}/{name}": Rule(floats, (len(labels), *shape), what=name) for name, shape in declared.items()}
    rules[f"{part.name}/counts"] = _count_rule(part, len(labels), contract)
    variances = f"{part.name}/variances"
    return rules | {variances: replace(rules[variances], low=0, what="variance")} if variances in rules else rules


def _shared_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    """As of class statistics, but one covariance for all classes; its numbers are float16 in every run."""
    labels = _checked_labels(part, part.shared_statistics.labels, contract)
    if not labels:  # then no tensor may be there either
        return {}
    declared = _declared(part, contract)
    means, variances = declared.get("means", ()), declared.get("variances", ())
    _require(part, ("counts", "means", "variances", "df"), contract)
    rules = {
        "counts": _count_rule(part, len(labels), contract),
        "means": Rule((_FLOAT16,), (len(labels), *means), what="means"),
        "variances": Rule((_FLOAT16,), variances, low=0, what="variance"),
        "df": Rule((_INT32,), (), low=0, what="degrees of freedom"),
        **_direction_rules(part, variances, contract),
    }
    return {f"{part.name}/{name}": rule for name, rule in rules.items()}


def _direction_rules(
    part: knowledge_pb2.Part, size: tuple[int, ...], contract: contract_pb2.Contract
) -> dict[str, Rule]:
    """Directions and their steps, of which there are as many; both or neither."""
    sent = part.shared_statistics
    if not sent.HasField("directions") and not sent.HasField("steps"):
        return {}
    _require(part, ("directions", "steps"), contract)
    rows = sent.directions.shape[0] if sent.directions.shape else 0
    most = next((one.most_rows for one in contract.uploads if one.part == part.name), 0)
    if not 1 <= rows <= most:
        path, expected = f"{part.name}/directions", f"at most {most}" if rows else "at least 1 if it is there"
        raise RefusedError(Code.BAD_TENSOR, f"{path} has {rows} rows, expected {expected}", {"tensor": path})
    return {
        "directions": Rule((_INT8,), (rows, *size), low=_LEAST_INT8, what="direction"),
        "steps": Rule((_FLOAT16,), (rows,), above=0, what="step"),
    }


def _checked_labels(part: knowledge_pb2.Part, labels: Sequence[int], contract: contract_pb2.Contract) -> Sequence[int]:
    """The classes that statistics are about, each one of the contract's and there once."""
    wrong = [label for label in labels if label >= len(contract.classes)]
    if wrong or len(set(labels)) != len(labels):
        what = f"class {wrong[0]} outside [0, {len(contract.classes)})" if wrong else "a class twice"
        raise RefusedError(Code.BAD_VALUE, f"part {part.name!r} has {what}")
    return labels


def _require(part: knowledge_pb2.Part, names: Iterable[str], contract: contract_pb2.Contract) -> None:
    """Refuses a part that lacks one of these tensors."""
    sent = getattr(part, str(part.WhichOneof("kind")))
    if missing := [name for name in names if not sent.HasField(name)]:
        text = f"part {part.name!r} lacks {', '.join(missing)}, which {contract.method} needs"
        raise RefusedError(Code.BAD_TENSOR, text, {"tensor": f"{part.name}/{missing[0]}"})


def _count_rule(part: knowledge_pb2.Part, classes: int, contract: contract_pb2.Contract) -> Rule:
    least = next((one.least_samples for one in contract.uploads if one.part == part.name), 0)
    return Rule((_INT32,), (classes,), low=max(least, 1), what="count")


def _parameter_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    """Exactly the tensors that the contract declares for this part, so that the engine need not look again."""
    declared = {t.name: t for one in contract.uploads if one.part == part.name for t in one.tensors}
    own = wire.slots(knowledge_pb2.Parts(parts=[part]))
    sent = {slot.path.removeprefix(f"{part.name}/") for slot in own}
    if missing := sorted(declared.keys() - sent):
        raise RefusedError(
            Code.BAD_TENSOR, f"part {part.name!r} lacks {', '.join(missing[:5])}", {"tensor": missing[0]}
        )
    return {f"{part.name}/{name}": Rule(_parameter_types(one), tuple(one.shape)) for name, one in declared.items()}


def _parameter_types(declared: contract_pb2.NamedShape) -> tuple[np.dtype, ...]:
    """What the contract says; in one from before it said types, scalar buffers may be counters, the rest is float32."""
    if declared.element_type in DTYPES:
        return (DTYPES[declared.element_type],)
    counter = "buffers" in declared.name.split("/") and not declared.shape
    return (_FLOAT32, _INT64) if counter else (_FLOAT32,)


def _model_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    """The declared tensors; a negative variance would make the outputs of a whole fleet's mean not a number."""
    rules = _parameter_rules(part, contract)
    variances = {path: rule for path, rule in rules.items() if path.endswith("running_var")}
    return rules | {path: replace(rule, low=0, what="running variance") for path, rule in variances.items()}


def _gradient_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    """The declared tensors, all float32; an infinite loss is a diverged model's and may come, NaN may not."""
    sent = part.distillation_gradient
    if sent.batch_size < 1 or not sent.loss >= 0:
        text = f"part {part.name!r} has batch_size {sent.batch_size} and loss {sent.loss:g}, must be >= 1 and >= 0"
        raise RefusedError(Code.BAD_VALUE, text)
    rules = _parameter_rules(part, contract)
    return {path: Rule((_FLOAT32,), rule.shape, what="gradient") for path, rule in rules.items()}


def _declared(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, tuple[int, ...]]:
    """Shapes that the contract declares for the tensors of a part."""
    return {one.part: {t.name: tuple(t.shape) for t in one.tensors} for one in contract.uploads}.get(part.name, {})


def _metric_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    metrics = part.metrics.metrics
    if len(metrics) > MOST_METRICS or len({(one.name, one.split) for one in metrics}) != len(metrics):
        text = f"part {part.name!r} has {len(metrics)} metrics, must be {MOST_METRICS} at most and each there once"
        raise RefusedError(Code.BAD_VALUE, text)
    for metric in metrics:
        labels = [one.label for one in metric.by_class]
        if len(set(labels)) != len(labels):
            raise RefusedError(Code.BAD_VALUE, f"metric {metric.name[:64]!r} has a class twice")
        numbers = [metric.sum, *(one.sum for one in metric.by_class)]
        if not all(math.isfinite(number) for number in numbers) or any(x >= len(contract.classes) for x in labels):
            raise RefusedError(Code.BAD_VALUE, f"metric {metric.name[:64]!r} is not finite or names an unknown class")
        counts = [metric.count, *(one.count for one in metric.by_class)]
        if not 1 <= len(metric.name) <= _MAX_WORD or len(metric.split) > _MAX_WORD or max(counts) >= 1 << 63:
            text = f"metric {metric.name[:64]!r}: its name must be 1 to {_MAX_WORD} characters, its count below 2**63"
            raise RefusedError(Code.BAD_VALUE, text)
    return {}


def _plan_rules(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> dict[str, Rule]:
    entries = part.plan.entries
    if part.ByteSize() > _MAX_PLAN_BYTES:
        text = f"part {part.name!r} has {part.ByteSize()} bytes of settings, must be at most {_MAX_PLAN_BYTES}"
        raise RefusedError(Code.TOO_LARGE, text)
    doubled = len({entry.name for entry in entries}) != len(entries)
    if doubled or any(entry.WhichOneof("value") is None for entry in entries):
        raise RefusedError(Code.BAD_MESSAGE, f"part {part.name!r} has a setting twice, or one without a value")
    return {}


_RULES: dict[str | None, Callable[[knowledge_pb2.Part, contract_pb2.Contract], dict[str, Rule]]] = {
    "proxy_knowledge": _proxy_rules,
    "weighted_predictions": _prediction_rules,
    "class_statistics": _statistics_rules,
    "shared_statistics": _shared_rules,
    "soft_predictions": _soft_rules,
    "model_parameters": _model_rules,
    "distillation_gradient": _gradient_rules,
    "generator": _model_rules,
    "discriminator": _model_rules,
    "plan": _plan_rules,
    "metrics": _metric_rules,
}
