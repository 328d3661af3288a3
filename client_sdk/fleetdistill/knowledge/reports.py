"""Kinds of parts without tensors: settings from the server, and figures from a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import Message

from fleetdistill.errors import RefusedError, WireError
from fleetdistill.printable import printable
from fleetdistill.wire.codes import Code
from fleetdistill.wire.kind import Kind, OwnForm, field_errors
from fleetdistill.wire.schema import Tensors
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

PlanValue = int | float | bool | str | list[int]

MAX_METRICS = 100
"""Maximum number of metrics in a part; the store has a row for each metric of an answer."""
_MAX_WORD = 64
_MAX_VALUE = 1e40
"""Largest magnitude of a metric's value: above any float32, as of a loss that diverged; sums of them are finite."""
_SHARES = ("accuracy", "leave_one_out", "own_statistics_kept")
"""Last parts of the names of metrics whose values are shares of rows; in the split `validation` all but `loss` are."""
_MAX_PLAN_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Plan(OwnForm):
    """Typed scalars of a method, such as its configuration, a cut layer or a count."""

    wire_name = "plan"

    values: Mapping[str, PlanValue]

    def fill(self, message: Message, path: str) -> None:
        """See `OwnForm.fill`: writes an entry for each value."""
        for name, value in self.values.items():
            entry = message.entries.add(name=name)  # type: ignore[attr-defined]
            with field_errors(f"{path}/{name}", value):
                _set_value(entry, value)

    @classmethod
    def read(cls, message: Message) -> Self:
        """Returns the plan in a message, such as the configuration in a contract."""
        values: dict[str, Any] = {}
        for entry in message.entries:  # type: ignore[attr-defined]
            which = entry.WhichOneof("value")
            if which is None:
                raise WireError(f"plan entry {entry.name!r} has no value")
            values[entry.name] = list(entry.integers.values) if which == "integers" else getattr(entry, which)
        return cls(values=values)

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """Checks a plan's size and that each setting occurs once; returns no tensors."""
        entries = part.plan.entries
        if part.ByteSize() > _MAX_PLAN_BYTES:
            text = f"part {part.name!r} has settings of {part.ByteSize()} bytes, must be at most {_MAX_PLAN_BYTES}"
            raise RefusedError(Code.TOO_LARGE, text)
        doubled = len({entry.name for entry in entries}) != len(entries)
        if doubled or any(entry.WhichOneof("value") is None for entry in entries):
            raise RefusedError(
                Code.BAD_MESSAGE, f"part {part.name!r} has a duplicate setting or a setting without a value"
            )
        return {}


def _set_value(entry: knowledge_pb2.PlanEntry, value: PlanValue) -> None:
    if isinstance(value, bool):
        entry.flag = value
    elif isinstance(value, int):
        entry.integer = value
    elif isinstance(value, float):
        entry.real = value
    elif isinstance(value, str):
        entry.text = value
    else:
        entry.integers.SetInParent()
        entry.integers.values.extend(value)


@dataclass(frozen=True, kw_only=True)
class ClassCount:
    """Value of a metric for the class `label`."""

    label: int
    sum: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric as sum and count, which can be added over devices; its value is `sum / count`.

    Attributes:
        name: 1 to 64 printable characters.
        split: Part of the data, such as `test`, at most 64 printable characters.
        sum: From `-1e40 * count` to `1e40 * count`; of a share, such as an accuracy, from 0 to `count`.
        count: Number of rows, from 0 to 2**63 - 1.
        by_class: The same for the rows of each class.
    """

    name: str
    split: str
    sum: float
    count: int
    by_class: list[ClassCount] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Metrics(Kind):
    """Metrics that a device reports."""

    wire_name = "metrics"
    possible_columns = ("metrics",)

    metrics: list[Metric]

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """Checks that metrics are in their ranges, unique and of known classes; returns no tensors."""
        metrics = part.metrics.metrics
        if len(metrics) > MAX_METRICS or len({(metric.name, metric.split) for metric in metrics}) != len(metrics):
            text = f"part {part.name!r} has {len(metrics)} metrics, must be at most {MAX_METRICS} with distinct names"
            raise RefusedError(Code.BAD_VALUE, text)
        for metric in metrics:
            _check_metric(metric, len(contract.classes))
        return {}


def _check_metric(metric: knowledge_pb2.Metric, classes: int) -> None:
    name = printable(metric.name[:_MAX_WORD])
    if not 1 <= len(metric.name) <= _MAX_WORD or len(metric.split) > _MAX_WORD:
        raise RefusedError(Code.BAD_VALUE, f"metric {name!r} must have a name of 1 to {_MAX_WORD} characters")
    if not (metric.name.isprintable() and metric.split.isprintable()):
        raise RefusedError(Code.BAD_VALUE, f"metric '{name}' has an invisible character in its name or split")
    labels = [row.label for row in metric.by_class]
    if len(set(labels)) != len(labels) or any(label >= classes for label in labels):
        raise RefusedError(Code.BAD_VALUE, f"metric {name!r} has a duplicate or unknown class")
    last = metric.name.rpartition("/")[2]
    share = last in _SHARES or (metric.split == "validation" and last != "loss")
    low, high = (0.0, 1.0) if share else (-_MAX_VALUE, _MAX_VALUE)
    rows: list[knowledge_pb2.Metric | knowledge_pb2.ClassCount] = [metric, *metric.by_class]
    for row in rows:
        if row.count >= 1 << 63:
            raise RefusedError(Code.BAD_VALUE, f"metric {name!r} has the count {row.count}, must be below 2**63")
        if not low * row.count <= row.sum <= high * row.count:  # false for NaN
            text = f"metric {name!r} has the sum {row.sum:g} of {row.count} rows, must be {low:g} to {high:g} per row"
            raise RefusedError(Code.BAD_VALUE, text)
