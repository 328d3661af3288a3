"""`Eligibility`, an app's conditions for work on its device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill.checked import check_flag, check_type
from fleetdistill.device.probes import Probe, system_probe
from fleetdistill.errors import ConfigurationError
from fleetdistill.interruption import Hold
from fleetdistill.names import did_you_mean, is_name
from fleetdistill.printable import printable

logger = logging.getLogger(__name__)

_YES_OR_NO = ("charging", "unmetered", "idle")
_TEXTS = {
    "charging": "the device is not charging",
    "unmetered": "the network is metered",
    "idle": "the device is not idle",
}


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Conditions under which a device may work. All of them must hold, before and during the work.

    While one does not hold, the device makes no calls. Work in progress stops within a second, after the current
    mini-batch or chunk, and is done again when all conditions hold.

    Args:
        charging: Whether the device must be connected to power.
        unmetered: Whether the network must be unmetered. Requires a probe of the app.
        idle: Whether other processes must use at most a quarter of the machine's CPU time.
        max_temperature: Maximum temperature of the hottest sensor, in degrees Celsius.
        min_free_memory: Minimum memory that is available to processes, in bytes.
        min_free_disk: Minimum free disk space at `state_dir`, in bytes.
        hours: Daily times `("22:00", "06:00")` in local time between which the device may work, the second exclusive.
        probes: The app's own probes by name, functions without arguments that may be called from any thread, four times
            a second. `charging`, `unmetered` and `idle` return a bool, `temperature`, `free_memory` and `free_disk` a
            number, also one of NumPy, each in place of the SDK's probe. Any other name is a further condition, which
            holds while its probe returns True. A condition does not hold if its probe raises an exception or returns
            None.

    Raises:
        ConfigurationError: A value is out of range, or this machine has no probe for a condition.
    """

    charging: bool = False
    unmetered: bool = False
    idle: bool = False
    max_temperature: float | None = None
    min_free_memory: int | None = None
    min_free_disk: int | None = None
    hours: tuple[str, str] | None = None
    probes: Mapping[str, Probe] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _YES_OR_NO:
            check_flag(name, getattr(self, name))
        for name in ("max_temperature", "min_free_memory", "min_free_disk"):
            _check_number(name, getattr(self, name))
        if self.hours is not None:
            _minutes_of(self.hours)
        check_type("probes", self.probes, Mapping, "a dict of functions by name")
        for name, probe in self.probes.items():
            if not isinstance(name, str) or not is_name(name) or not callable(probe):
                raise ConfigurationError(f"probes has {name!r}: {probe!r}, expected names with functions")
        self._check_probes(set(self.needed()))

    def _check_probes(self, needed: set[str]) -> None:
        known = {*_YES_OR_NO, *_LIMITS}
        unused = sorted((self.probes.keys() & known) - needed)
        if unused:
            raise ConfigurationError(f"probes has {unused[0]!r}, but that condition is not set; set it or remove it")
        for name in needed - self.probes.keys():
            if system_probe(name, Path()) is None:
                if own := next((probe for probe in self.probes if did_you_mean(probe, [name])), ""):
                    meant = did_you_mean(own, [name])
                    raise ConfigurationError(f"this machine cannot measure {name!r}, and probes has {own!r}{meant}")
                raise ConfigurationError(
                    f"this machine cannot measure {name!r}; pass Eligibility(probes={{{name!r}: function}}), "
                    f"or leave the condition out{_PSUTIL if name != 'unmetered' else ''}"
                )

    def needed(self) -> Iterator[str]:
        """Yields the names of the conditions that need a probe, without the app's further ones."""
        yield from (name for name in _YES_OR_NO if getattr(self, name))
        yield from (name for name, (limit, _, _) in _LIMITS.items() if getattr(self, limit) is not None)


_PSUTIL = ". Most conditions require psutil and its sensors"
_LIMITS: Mapping[str, tuple[str, int, str]] = {
    "temperature": ("max_temperature", 1, "the temperature is {:.0f} °C, above {:.0f} °C"),
    "free_memory": ("min_free_memory", -1, "{:.0f} bytes of memory are available, fewer than {:.0f}"),
    "free_disk": ("min_free_disk", -1, "{:.0f} bytes of disk space are free, fewer than {:.0f}"),
}
"""For each condition with a limit: its setting, 1 for a maximum or -1 for a minimum, and the text."""


class Conditions:
    """The conditions of one device.

    Args:
        eligibility: The app's conditions.
        directory: The state directory.
    """

    def __init__(self, eligibility: Eligibility, directory: Path) -> None:
        self._eligibility = eligibility
        system = {name: system_probe(name, directory) for name in eligibility.needed()}
        self._probes: Mapping[str, Probe | None] = {**system, **eligibility.probes}
        self._failed: dict[str, str] = {}  # what probes have raised, of which the first is logged

    def hold(self, now: datetime) -> Hold | None:
        """Returns the first condition that does not hold at a local time, or None if all hold."""
        if (hours := self._eligibility.hours) is not None and (seconds := seconds_until(hours, now)) > 0:
            return Hold("hours", f"it is outside the hours {hours[0]} to {hours[1]}", seconds)
        for name, probe in self._probes.items():
            text = self._reason(name, self._value(name, probe))
            if text:
                return Hold(name, text)
        return None

    def _reason(self, name: str, value: bool | float | None) -> str:
        if value is None:
            returned = "its probe returned None" if name in self._eligibility.probes else ""
            why = self._failed.get(name, returned)
            return f"{name} cannot be measured" + (f": {why}" if why else "")
        if name not in _LIMITS:
            given = "" if isinstance(value, bool) else f": its probe returned {value!r}, expected True or False"
            return "" if value is True else _TEXTS.get(name, f"{name} does not hold") + given
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            return f"{name} cannot be used: its probe returned {value!r}, expected a finite number"
        setting, sign, text = _LIMITS[name]
        limit = getattr(self._eligibility, setting)
        return "" if sign * value <= sign * limit else text.format(value, limit)

    def _value(self, name: str, probe: Callable[[], bool | float | None] | None) -> bool | float | None:
        try:
            value: Any = None if probe is None else probe()
            result: bool | float | None = value.item() if isinstance(value, np.generic) else value
            return result
        except Exception as error:
            if name not in self._failed:
                logger.warning("the probe of %s failed; the condition does not hold", name, exc_info=error)
            self._failed[name] = f"its probe raised {type(error).__name__}: {printable(str(error))}"
            return None


def seconds_until(hours: tuple[str, str], now: datetime) -> float:
    """Returns the seconds until the device may work again; 0 between the two times."""
    start, end = _minutes_of(hours)
    minute = now.hour * 60 + now.minute
    if start <= minute < end if start < end else not end <= minute < start:
        return 0.0
    begin = now.replace(hour=start // 60, minute=start % 60, second=0, microsecond=0)
    return ((begin if begin > now else begin + timedelta(days=1)) - now).total_seconds()


def _minutes_of(hours: Iterable[str]) -> tuple[int, int]:
    try:
        start, end = (datetime.strptime(text, "%H:%M") for text in hours)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'hours is {hours!r}, expected two times such as ("22:00", "06:00")') from error
    if start == end:
        raise ConfigurationError(f"hours is {hours!r}, expected two different times")
    return start.hour * 60 + start.minute, end.hour * 60 + end.minute


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{name} is {value!r}, expected a finite number")
    if value <= 0:
        raise ConfigurationError(f"{name} is {value!r}, must be above 0")
