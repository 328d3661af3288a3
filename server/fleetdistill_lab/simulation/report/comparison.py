"""Compares a method with its controls: accuracy, bytes and exchanges, as table rows and as curves of a plot."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.knowledge import GENERAL
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.metrics import Ints, accuracy, accuracy_or_none
from fleetdistill_lab.simulation.report.scores import in_class_mix
from fleetdistill_server.store.records import Traffic
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table

ALONE = "alone"
NAMES: Mapping[str, str] = {
    "classstats": "class statistics",
    "classstats_private": "class statistics with noise",
    "fedavg": "FedAvg",
}
"""Display names of methods, where they differ from the name in run.toml."""


@dataclass(frozen=True)
class Cost:
    """Communication cost of a run per device.

    Attributes:
        bytes_by_round: For each completed round, bytes from (`up`) and to (`down`) a device; see
            `FleetReport.bytes_by_round`.
        exchanges: Mean number of a device's answers that contain tensors, in the whole run; answers without tensors
            only acknowledge a delivery.
    """

    bytes_by_round: list[dict[str, float]]
    exchanges: float

    @property
    def bytes_so_far(self) -> list[float]:
        """Bytes in both directions from the start of the run to the end of each round."""
        return list(itertools.accumulate(item["up"] + item["down"] for item in self.bytes_by_round))

    @property
    def bytes(self) -> float:
        """Bytes in both directions in the whole run."""
        return sum(item["up"] + item["down"] for item in self.bytes_by_round)


@dataclass(frozen=True)
class ComparisonRow:
    """One row of the comparison.

    Attributes:
        name: Name of the method and of its model or variant.
        accuracy: Mean accuracy over the devices on the global test set, in [0, 1]; None if it could not be scored.
        own_accuracy: Mean accuracy with classes weighted by each device's samples.
        bytes: Bytes from and to a device in the whole run.
        exchanges: Number of exchanges of knowledge with the server in the whole run; see `Cost`.
    """

    name: str
    accuracy: float | None
    own_accuracy: float | None
    bytes: float
    exchanges: float


@dataclass(frozen=True)
class Curve:
    """Accuracy on the global test set as a function of bytes.

    Attributes:
        name: As in `ComparisonRow`.
        bytes: Bytes from and to a device until the end of each completed round.
        accuracy: Mean accuracy over the devices after each completed round; None if unknown.
        devices: Each device's accuracy after the last round; empty for a global model.
    """

    name: str
    bytes: list[float]
    accuracy: list[float | None]
    devices: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Candidate:
    """One entry of the comparison, which gives one table row and one curve: the fleet's models or variants of one kind.

    Attributes:
        name: As in `ComparisonRow`.
        counts_kr: For each device, its model's confusion matrices `[C, C]` after each completed round; None before it
            had the variant. For a global model, a single entry.
        samples_jc: `[J, C]`, number of device j's training samples of each class.
        cost: Communication cost of the run.
        is_global: Whether this is one model for all devices.
    """

    name: str
    counts_kr: Sequence[Sequence[Ints | None]]
    samples_jc: Ints
    cost: Cost
    is_global: bool = False

    def row(self) -> ComparisonRow:
        """Returns the row of the comparison table."""
        last = [item[-1] for item in self.counts_kr] * (len(self.samples_jc) if self.is_global else 1)
        scored = [(one, own) for one, own in zip(last, self.samples_jc, strict=True) if one is not None]
        own_parts = [in_class_mix(counts, own[None])[0] for counts, own in scored]
        return ComparisonRow(
            name=self.name,
            accuracy=_mean([accuracy(counts) for counts, _ in scored]),
            own_accuracy=_mean([accuracy(part) for part in own_parts if part.any()]),
            bytes=self.cost.bytes,
            exchanges=self.cost.exchanges,
        )

    def curve(self) -> Curve:
        """Returns the curve of the comparison plot."""
        scored = [[accuracy_or_none(count) for count in counts] for counts in self.counts_kr]
        by_round = [[rate for rate in rates if rate is not None] for rates in zip(*scored, strict=True)]
        at_end = [] if self.is_global else by_round[-1]
        return Curve(self.name, self.cost.bytes_so_far, [_mean(rates) for rates in by_round], at_end)


def candidates(method: str, history: FleetHistory, samples_jc: Ints, cost: Cost) -> list[Candidate]:
    """Returns a run's device models, by variant, and its global model unless all devices have that model."""
    name = NAMES.get(method, method)
    of_devices = f"{name} devices" if method == "fedavg" else name
    missing: list[Ints | None] = [None] * len(history.server)
    variants: dict[str, list[Sequence[Ints | None]]] = {
        f"{name} {GENERAL}" if history.further else of_devices: list(history.devices.values())
    }
    for variant, of in history.further.items():
        variants[f"{name} {variant}"] = [of.get(device, missing) for device in history.devices]
    result = [Candidate(named, counts_kr, samples_jc, cost) for named, counts_kr in variants.items()]
    if _has_separate_global_model(history):
        result.append(Candidate(f"{name} global", [history.server], samples_jc, cost, is_global=True))
    return result


def _has_separate_global_model(history: FleetHistory) -> bool:
    last = history.server[-1]
    scored = [counts for counts in history.last() if counts is not None]
    return last is not None and not (scored and all(np.array_equal(counts, last) for counts in scored))


def local_only(counts_kr: Sequence[Sequence[Ints | None]], samples_jc: Ints) -> Candidate:
    """Returns the candidate of the local-only control; arguments as in `Candidate`."""
    return Candidate(ALONE, counts_kr, samples_jc, Cost([], 0.0))


def cost_of(store: Store, run: str, devices: int) -> Cost:
    """Computes the communication cost of a run with this number of devices."""
    completed = [item.number for item in store.runs.rounds(run) if item.status is RoundStatus.CLOSED]
    answered = {upload.ask for upload in store.asks.uploads(run) if upload.data_bytes}
    return Cost(bytes_by_round(store.history.traffic(run), completed, devices), len(answered) / devices)


def bytes_by_round(traffic: Sequence[Traffic], completed: Sequence[int], devices: int) -> list[dict[str, float]]:
    """Computes `FleetReport.bytes_by_round`; `completed` has the numbers of the completed rounds, ascending."""
    result = [{"up": 0, "down": 0} for _ in completed]
    for sent in traffic:
        until = bisect_left(completed, sent.round)  # bytes of a short round count for the next completed one
        if until < len(completed):
            result[until][sent.direction] += sent.uncompressed_bytes
    return [{direction: total / devices for direction, total in item.items()} for item in result]


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """Formats the comparison as a table; bytes and exchanges are per device in the whole run."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    narrow: dict[str, Any] = {"padding": (0, 1), "show_edge": False, "pad_edge": False}
    title = "Means over the devices; bytes in both directions, in the whole run"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **narrow)
    table.add_column("", no_wrap=True)
    for name in ("all classes", "own classes", "bytes", "exchanges"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cost = (readable_bytes(round(row.bytes)), f"{row.exchanges:.3g}") if row.exchanges else ("0", "0")
        table.add_row(row.name, _percent(row.accuracy), _percent(row.own_accuracy), *cost)
    return table


def _percent(rate: float | None) -> str:
    return "not scored" if rate is None else f"{rate:.1%}"


def _mean(rates: Sequence[float]) -> float | None:
    return statistics.mean(rates) if rates else None
