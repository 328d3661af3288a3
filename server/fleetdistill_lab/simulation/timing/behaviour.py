"""Describes how a simulated fleet behaves: when its devices are available and how fast, and draws that from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

from fleetdistill.errors import ConfigurationError
from fleetdistill.seeds import derive_seed
from fleetdistill_lab.simulation.timing.traces import Interval, Traces, check_traces

DAY_SECONDS = 86_400.0
USUAL_SHARE = 1 / 3
"""Share of the day of `availability = "diurnal"`: eight hours."""


@dataclass(frozen=True, kw_only=True)
class FleetBehaviour:
    """Behaviour of a simulated fleet in simulated time. The same seed gives the same fleet.

    Raises:
        ConfigurationError: A value is out of range, or two values contradict each other.

    Attributes:
        availability: `always`, or `diurnal:SHARE`: each device is available once per day, for SHARE of it, in (0, 1].
            The windows centre around 03:00. `diurnal` is `diurnal:0.333`.
        compute: `constant`, or `lognormal:SIGMA`: each device takes exp(SIGMA * z) times the median device's time,
            with z from a standard normal distribution; SIGMA in (0, 5].
        seconds_per_sample: Seconds per training sample that the median device needs to answer an ask, at least 0.
        seconds_per_ask: Seconds that the median device needs for every ask in addition, at least 0.
        churn: Mean number of times per day of availability that a device loses contact without notice, at least 0.
        away_seconds: Mean duration of such a loss in seconds, above 0; exponentially distributed, as is the time
            between losses.
        join_late: Share of the devices that join later than the start, in [0, 1]; the times are spread evenly.
        join_seconds: Time at which the last of them joins, in seconds after the start, above 0.
        traces: The devices' own traces from `read_traces`: for each device, its available intervals `(start, end,
            speed)` in seconds after the start, where speed 2 halves the time per ask. Assigned to the devices in turn.
        repeat_seconds: Period after which the traces repeat, in seconds; 0 if they do not repeat.
    """

    availability: str = "always"
    compute: str = "constant"
    seconds_per_sample: float = 0.01
    seconds_per_ask: float = 1.0
    churn: float = 0.0
    away_seconds: float = 3600.0
    join_late: float = 0.0
    join_seconds: float = DAY_SECONDS
    traces: Traces = ()
    repeat_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            _check_range(name, getattr(self, name), least, most)
        for name in ("away_seconds", "join_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"[fleet] {name} is {getattr(self, name)}, must be above 0")
        _ = self.share, self.sigma
        if self.traces and self.availability != "always":
            raise ConfigurationError(
                f"[fleet] availability is {self.availability!r}, but traces state when devices are available; use one"
            )
        if self.repeat_seconds and not self.traces:
            raise ConfigurationError("[fleet] repeat_seconds has no effect without traces; remove it, or add traces")
        check_traces(self.traces, self.repeat_seconds)

    @property
    def share(self) -> float:
        """Share of the day that each device is available, without churn and late joins, in (0, 1]."""
        name, value = _parse("availability", self.availability, ("always", "diurnal"), USUAL_SHARE)
        if not 0 < value <= 1:
            raise ConfigurationError(f"[fleet] availability is {self.availability!r}, its share must be in (0, 1]")
        return 1.0 if name == "always" else value

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of the devices' times; 0 if all take the same time."""
        name, value = _parse("compute", self.compute, ("constant", "lognormal"), None)
        if not 0 < value <= _MAX_SIGMA:
            raise ConfigurationError(f"[fleet] compute is {self.compute!r}, its sigma must be in (0, {_MAX_SIGMA}]")
        return 0.0 if name == "constant" else value


_MAX_SIGMA = 5
_RANGES = {
    "seconds_per_sample": (0.0, 1e6),
    "seconds_per_ask": (0.0, 1e6),
    "churn": (0.0, 1e4),
    "away_seconds": (0.0, 1e9),
    "join_late": (0.0, 1.0),
    "join_seconds": (0.0, 1e9),
    "repeat_seconds": (0.0, 1e9),
}


def _check_range(name: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]  # it is a number
        raise ConfigurationError(f"[fleet] {name} is {value!r}, must be a number from {least:g} to {most:g}")


def _parse(setting: str, given: object, names: Sequence[str], usual: float | None) -> tuple[str, float]:
    """Splits `name:number`; the first name takes no number, the second one may have a usual number."""
    fixed, scaled = names
    name, colon, text = str(given).partition(":")
    number = text if colon else {fixed: "1", scaled: usual}.get(name)
    try:
        if name not in names or (name == fixed and colon) or number is None:
            raise ValueError
        return name, float(number)
    except ValueError:
        expected = f"{scaled}:NUMBER"
        raise ConfigurationError(f"[fleet] {setting} is {given!r}, expected {fixed} or {expected}") from None


def saved_behaviour(values: Mapping[str, Any]) -> FleetBehaviour:
    """Returns the behaviour whose fields were saved as JSON."""
    traces = tuple(tuple((start, end, speed) for start, end, speed in intervals) for intervals in values["traces"])
    return FleetBehaviour(**{**values, "traces": traces})


_CENTRE_SECONDS = 3 * 3600.0
"""Mean of the centres of the devices' daily windows, after midnight."""
_SPREAD_SECONDS = 3 * 3600.0
"""Standard deviation of the centres."""
_MAX_SHIFT_SECONDS = 3600.0
"""Largest shift of a device's window from one day's centre."""


class Span(NamedTuple):
    """An interval in which a device is available.

    Attributes:
        start, end: Seconds after the simulation's start; the end may be infinite.
        speed: Speed relative to the device's usual one.
        lost: Whether the device loses contact at the end without notice, instead of leaving.
    """

    start: float
    end: float
    speed: float
    lost: bool


class FleetTraces:
    """Availability and speed of each device of a fleet.

    Properties of a device that are drawn once, such as its speed, are the quantiles of their distribution in a random
    order, so that every fleet has nearly the same distribution.

    Args:
        behaviour: Behaviour of the fleet.
        devices: Ids of the devices.
        seed: The simulation's seed.

    Attributes:
        behaviour: Behaviour of the fleet.
        slowness: For each device, its time per ask relative to the median device.
        joins: For each device, when it joins, in seconds after the start.
    """

    def __init__(self, behaviour: FleetBehaviour, devices: Sequence[str], seed: int) -> None:
        self.behaviour, self._seed = behaviour, seed
        normal = NormalDist()
        self._numbers = {device: number for number, device in enumerate(devices)}

        def quantiles(name: str) -> dict[str, float]:
            ranks = self._ranks(name)
            return {device: normal.inv_cdf((rank + 0.5) / len(ranks)) for device, rank in ranks.items()}

        self.slowness = {device: math.exp(behaviour.sigma * z) for device, z in quantiles("speed").items()}
        self._centres = {device: _CENTRE_SECONDS + _SPREAD_SECONDS * z for device, z in quantiles("window").items()}
        late = round(behaviour.join_late * len(devices))
        self.joins = {
            device: behaviour.join_seconds * (rank + 1) / late if rank < late else 0.0
            for device, rank in self._ranks("join").items()
        }

    def _ranks(self, name: str) -> dict[str, int]:
        """Returns the numbers 0, 1, ... for the devices in an order drawn from the seed."""
        order = list(range(len(self._numbers)))
        random.Random(derive_seed(self._seed, "fleet", name)).shuffle(order)
        return dict(zip(self._numbers, order, strict=True))

    def spans(self, device: str) -> Iterator[Span]:
        """Yields a device's available intervals in ascending order, from the time at which it joins."""
        generator = random.Random(derive_seed(self._seed, "fleet", "device", device))
        joined = _from(self.joins[device], self._intervals(device, generator))
        rate = self.behaviour.churn / DAY_SECONDS
        away = self.behaviour.away_seconds
        if not rate:
            return (Span(*interval, lost=False) for interval in joined)
        return _with_losses(joined, generator, rate, away)

    def _intervals(self, device: str, generator: random.Random) -> Iterator[Interval]:
        traces = self.behaviour.traces
        if traces:
            return _repeat(traces[self._numbers[device] % len(traces)], self.behaviour.repeat_seconds)
        share = self.behaviour.share
        if share == 1:
            return iter([(0.0, math.inf, 1.0)])
        return _daily(self._centres[device], share, random.Random(generator.random()))


def _daily(centre: float, share: float, generator: random.Random) -> Iterator[Interval]:
    """Yields one window per day, of equal length and shifted at random so far that two windows never overlap."""
    shift = min(_MAX_SHIFT_SECONDS, (1 - share) * DAY_SECONDS / 2)
    half = share * DAY_SECONDS / 2
    day = -2  # the centre may be on the following or the previous day
    end = 0.0
    while True:
        middle = day * DAY_SECONDS + centre + generator.uniform(-shift, shift)
        if middle + half > 0:
            start, end = max(middle - half, end), middle + half  # by rounding, windows of almost a day could overlap
            yield start, end, 1.0
        day += 1


def _repeat(intervals: Sequence[Interval], period: float) -> Iterator[Interval]:
    """Yields the intervals of a trace, again after each period if there is one."""
    begin = 0.0
    while True:
        yield from ((begin + start, begin + end, speed) for start, end, speed in intervals)
        if not period:
            return
        begin += period


def _from(joins: float, intervals: Iterator[Interval]) -> Iterator[Interval]:
    """Yields the part of the intervals after a device has joined."""
    return ((max(start, joins), end, speed) for start, end, speed in intervals if end > joins)


def _with_losses(intervals: Iterator[Interval], generator: random.Random, rate: float, away: float) -> Iterator[Span]:
    """Yields the intervals without the times in which the device has lost contact.

    Args:
        intervals: Available intervals.
        generator: Draws the losses.
        rate: Mean number of losses per available second.
        away: Mean duration of a loss in seconds.
    """
    left, back = generator.expovariate(rate), 0.0  # available seconds until the next loss; end of the last loss
    for begin, end, speed in intervals:
        start = max(begin, back)
        while start < end:
            if start + left >= end:
                left -= end - start
                yield Span(start, end, speed, lost=False)
                break
            if left > 0:
                yield Span(start, start + left, speed, lost=True)
            back = start + left + generator.expovariate(1 / away)
            left, start = generator.expovariate(rate), back
