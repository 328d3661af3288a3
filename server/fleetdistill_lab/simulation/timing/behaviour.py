"""Describes how a simulated fleet behaves: when its devices are available, and how fast they work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.timing.traces import Traces, check_traces

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
