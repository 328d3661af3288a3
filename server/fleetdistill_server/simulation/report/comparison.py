"""A method beside its controls: accuracy, bytes and exchanges, as rows of a table and as curves of a picture."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.knowledge import GENERAL
from fleetdistill_server.simulation.report.history import FleetHistory
from fleetdistill_server.simulation.report.metrics import Ints, accuracy
from fleetdistill_server.simulation.report.scores import in_class_mix
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table

ALONE = "alone"
NAMES: Mapping[str, str] = {"classstats": "class statistics", "fedavg": "FedAvg"}
"""Of methods that people know by more than the word in run.toml."""


@dataclass(frozen=True)
class Cost:
    """What a run cost a device.

    Attributes:
        bytes_by_round: For each completed round what a device sent (`up`) and was sent (`down`), tensors and envelopes,
            mean over all devices; see `FleetReport.bytes_by_round`.
        exchanges: How often a device sent knowledge and was sent some for it, in the whole run, mean over all devices:
            its answers with tensors. An answer without any only says that it has what came.
    """

    bytes_by_round: list[dict[str, float]]
    exchanges: float

    @property
    def bytes_so_far(self) -> list[float]:
        """Both directions together, from the start to the end of each round."""
        return list(itertools.accumulate(one["up"] + one["down"] for one in self.bytes_by_round))

    @property
    def bytes(self) -> float:
        """Both directions of the whole run."""
        return sum(one["up"] + one["down"] for one in self.bytes_by_round)


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison.

    Attributes:
        name: Of a method, and which of its models or answers.
        accuracy: On the global test part, mean over the devices; None where it could not be scored.
        own_accuracy: The same with classes weighed as the device has them.
        bytes: That a device sent and was sent in the whole run.
        exchanges: Of knowledge with the server, in the whole run; see `Cost`.
    """

    name: str
    accuracy: float | None
    own_accuracy: float | None
    bytes: float
    exchanges: float


@dataclass(frozen=True)
class Curve:
    """Accuracy on the global test part against bytes.

    Attributes:
        name: As in `ComparisonRow`.
        bytes: What a device had sent and been sent after each completed round.
        accuracy: Mean over the devices; None where it is not known, or not there yet.
        devices: Of every single device at the end; empty for a global model.
    """

    name: str
    bytes: list[float]
    accuracy: list[float | None]
    devices: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Candidate:
    """A fleet's models or answers of one kind: what a row and a curve are made of.

    Attributes:
        name: As in `ComparisonRow`.
        counts_kr: For each device its confusion matrices `[C, C]` after each completed round; None before it had one.
            A global model is the only entry.
        samples_jc: `[J, C]`, training samples of each class that device j has.
        cost: What it took.
        is_global: Whether it is one model for all devices.
    """

    name: str
    counts_kr: Sequence[Sequence[Ints | None]]
    samples_jc: Ints
    cost: Cost
    is_global: bool = False

    def row(self) -> ComparisonRow:
        """Its line in the table."""
        last = [one[-1] for one in self.counts_kr] * (len(self.samples_jc) if self.is_global else 1)
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
        """Its line in the picture."""
        scored = [[None if one is None else accuracy(one) for one in counts] for counts in self.counts_kr]
        by_round = [[one for one in rates if one is not None] for rates in zip(*scored, strict=True)]
        at_end = [] if self.is_global else by_round[-1]
        return Curve(self.name, self.cost.bytes_so_far, [_mean(rates) for rates in by_round], at_end)


def candidates(method: str, history: FleetHistory, samples_jc: Ints, cost: Cost) -> list[Candidate]:
    """The devices' models of a run, answer by answer, and its global model where no device has the same one."""
    name = NAMES.get(method, method)
    of_devices = f"{name} devices" if method == "fedavg" else name
    missing: list[Ints | None] = [None] * len(history.server)
    answers: dict[str, list[Sequence[Ints | None]]] = {
        f"{name} {GENERAL}" if history.further else of_devices: list(history.devices.values())
    }
    for answer, of in history.further.items():
        answers[f"{name} {answer}"] = [of.get(device, missing) for device in history.devices]
    found = [Candidate(named, counts_kr, samples_jc, cost) for named, counts_kr in answers.items()]
    if _has_a_global_model_apart(history):
        found.append(Candidate(f"{name} global", [history.server], samples_jc, cost, is_global=True))
    return found


def _has_a_global_model_apart(history: FleetHistory) -> bool:
    last = history.server[-1]
    return last is not None and not all(np.array_equal(one, last) for one in history.last())


def trained_alone(counts_kr: Sequence[Sequence[Ints]], samples_jc: Ints) -> Candidate:
    """Devices that train by themselves; see `Candidate`."""
    return Candidate(ALONE, counts_kr, samples_jc, Cost([], 0.0))


def cost_of(store: Store, run: str, devices: int) -> Cost:
    """The cost of a run that is over, of so many devices."""
    completed = [row["round"] for row in store.runs.rounds(run) if row["status"] == "closed"]
    answered = {row["ask"] for row in store.asks.uploads(run) if row["data_bytes"]}
    return Cost(bytes_by_round(store.history.traffic(run), completed, devices), len(answered) / devices)


def bytes_by_round(traffic: Sequence[Row], completed: Sequence[int], devices: int) -> list[dict[str, float]]:
    """See `FleetReport.bytes_by_round`; `completed` are the numbers of the completed rounds, ascending."""
    found = []
    for first, last in itertools.pairwise([-1, *completed]):
        rows = [one for one in traffic if first < one["round"] <= last]
        found.append({direction: total_bytes(rows, direction) / devices for direction in ("up", "down")})
    return found


def total_bytes(traffic: Sequence[Row], direction: str) -> int:
    """Tensors and envelopes of one direction."""
    return sum(one["tensor_bytes"] + one["envelope_bytes"] for one in traffic if one["direction"] == direction)


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """The rows for people; bytes and exchanges are a device's in the whole run."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    narrow: dict[str, Any] = {"padding": (0, 1), "show_edge": False, "pad_edge": False}
    title = "Means over the devices; bytes both ways, in the whole run"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **narrow)
    table.add_column("", no_wrap=True)
    for name in ("all classes", "own classes", "bytes", "exchanges"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in rows:
        cost = (readable_bytes(round(one.bytes)), f"{one.exchanges:.3g}") if one.exchanges else ("0", "0")
        table.add_row(one.name, _percent(one.accuracy), _percent(one.own_accuracy), *cost)
    return table


def _percent(rate: float | None) -> str:
    return "not scored" if rate is None else f"{rate:.1%}"


def _mean(rates: Sequence[float]) -> float | None:
    return statistics.mean(rates) if rates else None
