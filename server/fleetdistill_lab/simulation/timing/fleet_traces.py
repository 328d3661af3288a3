"""Generates every device's available intervals and speed from a `FleetBehaviour` and a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

from fleetdistill.seeds import derive_seed
from fleetdistill_lab.simulation.timing.behaviour import DAY_SECONDS, FleetBehaviour
from fleetdistill_lab.simulation.timing.traces import Interval

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
