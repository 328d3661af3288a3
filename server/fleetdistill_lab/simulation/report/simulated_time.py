"""Reports a simulation in simulated time: how long its rounds took, and which devices answered."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleetdistill_lab.simulation.report.outcome import Outcome
from fleetdistill_lab.simulation.timing.behaviour import Span
from fleetdistill_lab.simulation.timing.clock import START
from fleetdistill_lab.simulation.timing.timing import fleet_traces, work_log_path
from fleetdistill_lab.simulation.timing.work_log import read_work
from fleetdistill_server.store.records import Round
from fleetdistill_server.store.states import DEADLINE_PASSED, AskStatus, RoundStatus

_OUTCOMES = {
    DEADLINE_PASSED: "late",
    "declined": "declined",
    "enough devices answered": "not_needed",
    "round closed": "not_needed",
}
"""Outcome by the reason why an ask was closed; for all other reasons, the device is dropped."""
_WORST_FIRST = ("late", "dropped", "declined", "not_needed", "answered")


@dataclass(frozen=True)
class SimulatedRound:
    """A round in simulated time.

    Attributes:
        round: Number of the round.
        status: `closed`, `short` or `open`.
        started: Start in seconds after the simulation's start.
        ended: End in seconds after the simulation's start; None for an open round.
        asked, answered: Number of devices that were asked, and of those that answered every ask.
        late, dropped, declined, not_needed: Devices that missed a deadline; that left or lost contact; that declined;
            and whose answer was not waited for, because enough others had answered.
        absent: Number of devices that were not available when the round started.
    """

    round: int
    status: str
    started: float
    ended: float | None
    asked: int
    answered: int
    late: list[str]
    dropped: list[str]
    declined: list[str]
    not_needed: list[str]
    absent: int


@dataclass(frozen=True)
class SimulatedDevice:
    """A device in simulated time.

    Attributes:
        answered, late, dropped, declined, not_needed: Number of rounds with this outcome; see `SimulatedRound`.
        absent: Number of rounds at whose start the device was not available.
        work_seconds: Seconds that the device worked on asks, including work that was late or interrupted.
    """

    answered: int
    late: int
    dropped: int
    declined: int
    not_needed: int
    absent: int
    work_seconds: float


@dataclass(frozen=True)
class SimulatedTimes:
    """A simulation in simulated time, apart from the time that the machine took for it.

    Attributes:
        seconds: Simulated seconds from the start to the end of the last round.
        rounds: All rounds, including short ones.
        devices: The devices, by id.
    """

    seconds: float
    rounds: list[SimulatedRound]
    devices: dict[str, SimulatedDevice]


def simulated_times(done: Outcome) -> SimulatedTimes | None:
    """Returns the simulation's times; None for a simulation without simulated time."""
    behaviour = done.wanted.behaviour
    if behaviour is None:
        return None
    stored = done.store.runs.rounds(done.run)
    outcomes = _outcomes(done)
    traces = fleet_traces(behaviour, done.specs)
    starts = [item.started_at - START for item in stored]
    absent = {spec.name: _absences(traces.spans(spec.name), starts) for spec in done.specs}
    rounds = [
        _round(one, outcomes[one.number], sum(flags[index] for flags in absent.values()))
        for index, one in enumerate(stored)
    ]
    worked = defaultdict[str, float](float)
    for work in read_work(work_log_path(done.config)):
        worked[work.device] += work.end - work.start
    devices = {
        name: SimulatedDevice(
            **{kind: sum(found.get(name) == kind for found in outcomes.values()) for kind in _WORST_FIRST},
            absent=sum(flags),
            work_seconds=round(worked[name], 3),
        )
        for name, flags in absent.items()
    }
    return SimulatedTimes(max((item.ended or item.started for item in rounds), default=0.0), rounds, devices)


def _outcomes(done: Outcome) -> dict[int, dict[str, str]]:
    """Returns the outcome of every device that a round asked, by round and device: the worst of its asks."""
    result: dict[int, dict[str, str]] = defaultdict(dict)
    for ask in done.store.asks.of_run(done.run):
        outcome = "answered" if ask.status is AskStatus.ANSWERED else _OUTCOMES.get(ask.reason, "dropped")
        if ask.status is AskStatus.OPEN:
            outcome = "not_needed"
        before = result[ask.round].get(ask.device, outcome)
        result[ask.round][ask.device] = min(before, outcome, key=_WORST_FIRST.index)
    return result


def _round(stored: Round, outcomes: dict[str, str], absent: int) -> SimulatedRound:
    def with_outcome(kind: str) -> list[str]:
        return sorted(name for name, outcome in outcomes.items() if outcome == kind)

    return SimulatedRound(
        round=stored.number,
        status=str(stored.status),
        started=_seconds(stored.started_at),
        ended=None if stored.ended_at is None else _seconds(stored.ended_at),
        asked=len(outcomes),
        answered=len(with_outcome("answered")),
        late=with_outcome("late"),
        dropped=with_outcome("dropped"),
        declined=with_outcome("declined"),
        not_needed=with_outcome("not_needed"),
        absent=absent,
    )


def _seconds(at: float) -> float:
    return round(at - START, 3)


def _absences(spans: Iterator[Span], times: Sequence[float]) -> list[bool]:
    """Returns for each of the ascending times whether it is outside all intervals."""
    span = next(spans, None)
    result = []
    for time in times:
        while span is not None and span.end <= time:
            span = next(spans, None)
        result.append(span is None or time < span.start)
    return result


def time_lines(times: SimulatedTimes | None) -> list[str]:
    """Returns the summary of a simulation in simulated time; none without simulated time."""
    if times is None:
        return []
    closed = [item for item in times.rounds if item.status == RoundStatus.CLOSED and item.ended is not None]
    durations = [item.ended - item.started for item in closed if item.ended is not None]
    text = f"simulated time: {readable_seconds(times.seconds)}"
    if durations:
        text += f", {readable_seconds(statistics.median(durations))} per round (median)"
    short = sum(item.status == RoundStatus.SHORT for item in times.rounds)
    text += f"; {short} of {len(times.rounds)} rounds fell short" if short else ""
    counts = [f"{sum(item.answered for item in times.rounds)} answered"]
    for kind in ("late", "dropped", "declined", "not_needed"):
        if count := sum(len(getattr(item, kind)) for item in times.rounds):
            counts.append(f"{count} {kind.replace('_', ' ')}")
    absent = statistics.mean(item.absent for item in times.rounds) if times.rounds else 0.0
    return [f"{text}; devices per outcome over all rounds: {', '.join(counts)}; {absent:.1f} absent per round"]


def readable_seconds(seconds: float) -> str:
    """Returns a duration such as `45 s`, `3 min 20 s`, `5 h 02 min` or `2 d 05 h`."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if days:
        return f"{days} d {hours % 24:02d} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{seconds:.3g} s"
