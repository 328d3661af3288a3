"""Compares a method with its controls: accuracy, bytes, exchanges and steps, as table rows and as curves of a plot."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import TypedDict

from fleetdistill.knowledge import DELIVER, GENERAL
from fleetdistill.training.figures import Confusion
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.report.metrics import (
    CurveSummary,
    Fairness,
    Ints,
    accuracy,
    accuracy_or_none,
    fairness_of,
    rounds_to,
    summarize,
)
from fleetdistill_lab.simulation.report.scores import margins_in_mix
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.score_log import read_steps
from fleetdistill_server.store.records import Traffic, Upload
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import REFUSED
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


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run has cost from its start to the end of a round; what short rounds cost is included.

    Exchanges and steps are means over the devices that answered in a round, summed over the rounds. Bytes are of all
    devices. Initial weights and a proxy set count, the final model in the last round; calls without a payload do not.

    Attributes:
        exchanges: Answers that contain tensors, each of which replies to what the server sent.
        steps: Steps of a device's optimisers. With one loss for each mini-batch, these are mini-batch steps.
        tensor_bytes_up, tensor_bytes_down: Bytes of tensors from and to the devices, before compression.
        envelope_bytes_up, envelope_bytes_down: Bytes of the headers around them.
        refused_bytes_up: Bytes of answers that arrived but were not accepted, as sent.
    """

    exchanges: float
    steps: float
    tensor_bytes_up: int
    tensor_bytes_down: int
    envelope_bytes_up: int
    envelope_bytes_down: int
    refused_bytes_up: int


def spent_to(curve: Sequence[float | None], spent: Sequence[Spent], target: float) -> Spent | None:
    """Returns what a run had cost when its curve first reached the target; None if it never does; see `rounds_to`."""
    number = rounds_to(curve, target)
    return None if number is None else spent[number - 1]


class RoundBytes(TypedDict):
    """Bytes of one round, tensors and envelopes, uncompressed, mean over all devices.

    Attributes:
        up: Bytes from a device.
        down: Bytes to a device.
    """

    up: float
    down: float


@dataclass(frozen=True)
class Cost:
    """Cost of a run per device.

    Attributes:
        bytes_by_round: Bytes of each completed round; see `FleetReport.bytes_by_round`.
        exchanges: Mean number of a device's answers that contain tensors, in the whole run, over all devices; answers
            without tensors only acknowledge a delivery.
        spent: What the run has cost until the end of each completed round.
    """

    bytes_by_round: list[RoundBytes]
    exchanges: float
    spent: list[Spent] = field(default_factory=list)

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
        name: What is compared: training alone, the method's variants and global model, and those of FedAvg.
        accuracy: Mean accuracy over the devices on the global test set, in [0, 1]; None if it could not be scored.
        own_accuracy: Mean accuracy on each device's own test rows, or with classes weighted by its samples.
        bytes: Bytes from and to a device in the whole run.
        exchanges: Mean number of a device's answers that contain tensors, in the whole run.
        devices: Number of devices that the means are over: those that took part and were scored, or with the score
            `devices` all that were scored.
        untrained: Number of these devices that never took part, so that their models are those of before the run, or
            what the method sends to such a device.
        fairness, own_fairness: How evenly the accuracies are spread over the devices, on all classes and on own ones;
            None if nothing was scored.
        top_k: Mean over the devices of the share of samples whose class is among the `FleetReport.top_k` with the
            largest logits, on the global test set; None without `Simulation.top_k`.
    """

    name: str
    accuracy: float | None
    own_accuracy: float | None
    bytes: float
    exchanges: float
    devices: int = 0
    untrained: int = 0
    fairness: Fairness | None = None
    own_fairness: Fairness | None = None
    top_k: float | None = None


@dataclass(frozen=True)
class Curve:
    """Accuracy on the global test set as a function of bytes.

    Attributes:
        name: As in `ComparisonRow`.
        bytes: Bytes from and to a device until the end of each completed round.
        accuracy: Mean accuracy over the devices after each completed round; None if unknown.
        devices: Each device's accuracy after the last round; empty for a global model.
        spent: What the run has cost until the end of each completed round.
        summary: Final and best accuracy, and the last rounds.
    """

    name: str
    bytes: list[float]
    accuracy: list[float | None]
    devices: list[float] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)
    summary: CurveSummary = CurveSummary()  # noqa: RUF009  (frozen)


@dataclass(frozen=True)
class Candidate:
    """One entry of the comparison, which gives one table row and one curve: the fleet's models or variants of one kind.

    Attributes:
        name: As in `ComparisonRow`.
        counts_kr: For each device, its model's confusion matrices after each completed round; None before it
            had the variant. For a global model, a single entry.
        samples_jc: `[J, C]`, number of device j's training samples of each class.
        cost: Cost of the run.
        is_global: Whether this is one model for all devices.
        took_part: Whether each device ever trained; empty if all did, or for a global model.
        top_k: As `counts_kr`, after the last round only, with top-k predictions; empty without them.
        own_k: For each device, the matrix of its model, or of the global one, on its own test rows after the last
            round; None for a fleet without such rows.
    """

    name: str
    counts_kr: Sequence[Sequence[Confusion | None]]
    samples_jc: Ints
    cost: Cost
    is_global: bool = False
    took_part: Sequence[bool] = ()
    top_k: Sequence[Confusion | None] = ()
    own_k: Sequence[Confusion | None] | None = None

    def row(self) -> ComparisonRow:
        """Returns the row of the comparison table."""
        last = [item[-1] for item in self.counts_kr] * (len(self.samples_jc) if self.is_global else 1)
        scored = [(one, own) for one, own in zip(last, self.samples_jc, strict=True) if one is not None]
        own_parts = (
            [margins_in_mix(counts, own[None]).part(0) for counts, own in scored]
            if self.own_k is None
            else [counts for counts in self.own_k if counts is not None]
        )
        rates = [accuracy(counts) for counts, _ in scored]
        own_rates = [rate for part in own_parts if not math.isnan(rate := accuracy(part))]
        took_part = self.took_part or [True] * len(last)
        return ComparisonRow(
            name=self.name,
            accuracy=_mean(rates),
            own_accuracy=_mean(own_rates),
            bytes=self.cost.bytes,
            exchanges=self.cost.exchanges,
            devices=len(scored),
            untrained=sum(one is not None and not part for one, part in zip(last, took_part, strict=True)),
            fairness=fairness_of(rates),
            own_fairness=fairness_of(own_rates),
            top_k=_mean([accuracy(counts) for counts in self.top_k if counts is not None]),
        )

    def curve(self) -> Curve:
        """Returns the curve of the comparison plot."""
        scored = [[accuracy_or_none(count) for count in counts] for counts in self.counts_kr]
        by_round = [[rate for rate in rates if rate is not None] for rates in zip(*scored, strict=True)]
        at_end = [] if self.is_global else by_round[-1]
        means = [_mean(rates) for rates in by_round]
        return Curve(self.name, self.cost.bytes_so_far, means, at_end, self.cost.spent, summarize(means))


def candidates(
    method: str,
    history: FleetHistory,
    samples_jc: Ints,
    cost: Cost,
    top_k: FleetHistory | None = None,
    left_out: AbstractSet[str] = frozenset(),
) -> list[Candidate]:
    """Returns a run's device models, by variant, and its global model unless all devices have that model.

    Args:
        method: The run's method.
        history: The run's history.
        samples_jc: As in `Candidate`.
        cost: Cost of the run.
        top_k: History of the run's top-k scores; None without them.
        left_out: Devices on whose own classes the global model is not scored.
    """
    name = NAMES.get(method, method)
    of_devices = f"{name} devices" if method == "fedavg" else name
    missing: list[Confusion | None] = [None] * len(history.server)

    def all_variants(one: FleetHistory) -> dict[str, list[Sequence[Confusion | None]]]:
        variants = {f"{name} {GENERAL}" if history.further else of_devices: list(one.devices.values())}
        for variant, of in one.further.items():
            variants[f"{name} {variant}"] = [of.get(device, missing) for device in one.devices]
        return variants

    top = {} if top_k is None else {named: [of[-1] for of in kr] for named, kr in all_variants(top_k).items()}
    took_part = [any(history.took_part[device]) for device in history.devices]
    own = history.own
    own_k: list[list[Confusion | None] | None] = [history.last_own()]
    for variant in history.further:
        own_k.append(None if own is None else [own.last_further(variant, device) for device in own.devices])
    result = [
        Candidate(named, kr, samples_jc, cost, took_part=took_part, top_k=top.get(named, ()), own_k=of_own)
        for (named, kr), of_own in zip(all_variants(history).items(), own_k, strict=True)
    ]
    if _has_separate_global_model(history):
        last = [] if top_k is None else [top_k.server[-1]]
        counted = {device: row for row, device in enumerate(history.devices) if device not in left_out}
        of_own = None if own is None else [own.of_global.get(device) for device in counted]
        kept: dict[str, Any] = {"is_global": True, "top_k": last, "own_k": of_own}
        result.append(Candidate(f"{name} global", [history.server], samples_jc[[*counted.values()]], cost, **kept))
    return result


def _has_separate_global_model(history: FleetHistory) -> bool:
    last = history.server[-1]
    scored = [counts for counts in history.last() if counts is not None]
    return last is not None and not (scored and all(np.array_equal(counts.cells, last.cells) for counts in scored))


def local_only(
    counts_kr: Sequence[Sequence[Confusion | None]],
    samples_jc: Ints,
    took_part: Sequence[bool] = (),
    top_k: Sequence[Confusion | None] = (),
    own_k: Sequence[Confusion | None] | None = None,
) -> Candidate:
    """Returns the candidate of the local-only control; arguments as in `Candidate`."""
    return Candidate(ALONE, counts_kr, samples_jc, Cost([], 0.0), took_part=took_part, top_k=top_k, own_k=own_k)


def cost_of(store: Store, run: str, specs: Sequence[DeviceSpec]) -> Cost:
    """Computes the cost of a run with these devices."""
    completed = [item.number for item in store.runs.rounds(run) if item.status is RoundStatus.CLOSED]
    uploads = store.asks.uploads(run)
    answered = {upload.ask for upload in uploads if upload.data_bytes}
    steps = read_steps(specs[0].steps_file)
    return Cost(
        bytes_by_round(store.history.traffic(run), completed, len(specs)),
        len(answered) / len(specs),
        spent_by_round(store.history.total_traffic(run), uploads, steps, completed),
    )


def spent_by_round(
    traffic: Sequence[Traffic],
    uploads: Sequence[Upload],
    steps: Mapping[tuple[str, int], int],
    completed: Sequence[int],
) -> list[Spent]:
    """Computes what a run has cost until the end of each completed round.

    Args:
        traffic: The run's bytes, by kind of part.
        uploads: The run's accepted answers.
        steps: Steps of the optimisers by device and round; those of answers that were not accepted do not count.
        completed: Numbers of the completed rounds, ascending.
    """
    answers = defaultdict[int, set[int]](set)
    devices = defaultdict[int, set[str]](set)
    for upload in uploads:
        if upload.step != DELIVER:
            devices[upload.round].add(upload.device)
            answers[upload.round] |= {upload.ask} if upload.data_bytes else set()
    exchanges = {number: len(answers[number]) / len(of) for number, of in devices.items()}
    means = {number: sum(steps.get((name, number), 0) for name in of) / len(of) for number, of in devices.items()}

    columns: dict[str, Iterable[tuple[int, float]]] = {"exchanges": exchanges.items(), "steps": means.items()}
    for direction, part in itertools.product(("up", "down"), ("tensor_bytes", "envelope_bytes")):
        sent = [item for item in traffic if item.direction == direction]
        columns[f"{part}_{direction}"] = [(item.round, getattr(item, part)) for item in sent]
    columns["refused_bytes_up"] = [(item.round, item.sent_bytes) for item in traffic if item.kind == REFUSED]
    so_far = [itertools.accumulate(_by_completed(values, completed)) for values in columns.values()]
    return [Spent(**dict(zip(columns, row, strict=True))) for row in zip(*so_far, strict=True)]


def bytes_by_round(traffic: Sequence[Traffic], completed: Sequence[int], devices: int) -> list[RoundBytes]:
    """Computes `FleetReport.bytes_by_round`; `completed` has the numbers of the completed rounds, ascending."""
    up, down = (
        _by_completed([(sent.round, sent.uncompressed_bytes) for sent in traffic if sent.direction == one], completed)
        for one in ("up", "down")
    )
    return [{"up": sent / devices, "down": taken / devices} for sent, taken in zip(up, down, strict=True)]


def _by_completed(values: Iterable[tuple[int, float]], completed: Sequence[int]) -> list[float]:
    """Sums values by round; those of a short round count for the next completed one."""
    result: list[float] = [0] * len(completed)
    for number, value in values:
        until = bisect_left(completed, number)
        if until < len(completed):
            result[until] += value
    return result


def comparison_table(rows: Sequence[ComparisonRow], top_k: int | None = None) -> Table:
    """Formats the comparison as a table; bytes and exchanges are per device in the whole run.

    Args:
        rows: The comparison.
        top_k: k of the rows' top-k accuracies; None without them.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    narrow: dict[str, Any] = {"padding": (0, 1), "show_edge": False, "pad_edge": False}
    title = "Means over the devices; bytes in both directions, in the whole run"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **narrow)
    table.add_column("", no_wrap=True)
    top = [] if top_k is None else [f"top {top_k}"]
    for name in ("all classes", *top, "own classes", "bytes", "exchanges"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cost = (readable_bytes(round(row.bytes)), f"{row.exchanges:.3g}") if row.exchanges else ("0", "0")
        rates = [row.accuracy, *([row.top_k] if top else []), row.own_accuracy]
        table.add_row(row.name, *map(_percent, rates), *cost)
    return table


class MeanOverDevices(Protocol):
    """A row with means over devices; attributes as in `ComparisonRow`."""

    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def untrained(self) -> int: ...


def devices_lines(rows: Sequence[MeanOverDevices], devices: int) -> list[str]:
    """Returns over how many of a fleet's devices the means are, if any is over fewer or over untrained ones."""
    told = [
        f"{row.name} {row.devices}" + (f" ({row.untrained} never took part)" if row.untrained else "")
        for row in rows
        if row.devices < devices or row.untrained
    ]
    return [f"Means are over the devices that were scored, of {devices}: {', '.join(told)}"] if told else []


def _percent(rate: float | None) -> str:
    return "not scored" if rate is None else f"{rate:.1%}"


def _mean(rates: Sequence[float]) -> float | None:
    return statistics.mean(rates) if rates else None
