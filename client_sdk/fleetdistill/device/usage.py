"""What a device obeys after a restart, too: what it has used today, and the server's request to call again later.

`usage.json` is written ahead: its numbers are at least those used, so a process that is killed counts at most one step
too much, and never too little.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Mapping
from datetime import datetime

from fleetdistill.clock import Clock
from fleetdistill.errors import NoRoomError, StateError
from fleetdistill.state.files import Files
from fleetdistill.state.format import json_object

USAGE = "usage.json"
PACE = "pace.json"
_SHORTEST_STORED_SECONDS = 1.0
"""Shorter pauses end before a restarted process can call; an idle device does not write to the disk for them."""
_STEPS = {"bytes": 256 << 10, "compute_seconds": 5.0}
"""Largest amounts that are written ahead."""
_PARTS = 20
"""A limit is at least this many times the amount that is written ahead."""


class Usage:
    """Durable counters of the current local day. Thread-safe.

    Args:
        files: The state directory.
        clock: The device's clock.
        limits: Limit of each counter, `bytes` and `compute_seconds`; those without a limit are not counted.
    """

    def __init__(self, files: Files, clock: Clock, limits: Mapping[str, float]) -> None:
        self._files = files
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._day, self._written = self._load()
        self._used = dict(self._written)

    def add(self, name: str, amount: float) -> None:
        """Adds an amount to a counter; returns after it is durable."""
        if name not in self._limits:
            return
        with self._lock:
            self._turn_day()
            self._used[name] += amount
            if self._used[name] > self._written[name]:
                step = min(_STEPS[name], self._limits[name] / _PARTS)
                self._write({**self._written, name: self._used[name] + step})

    def exceeded(self) -> str:
        """Returns the name of a counter that has reached its limit, or an empty string."""
        with self._lock:
            self._turn_day()
            return next((name for name, limit in self._limits.items() if self._used[name] >= limit), "")

    def settle(self) -> None:
        """Writes the exact counters, at the end of the process."""
        with self._lock:
            self._turn_day()
            if self._used != self._written:
                self._write(dict(self._used))

    def _turn_day(self) -> None:
        if self._today() != self._day:
            self._day, self._used, self._written = self._today(), _zero(), _zero()

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock.time()).date().isoformat()

    def _write(self, numbers: dict[str, float]) -> None:
        with contextlib.suppress(NoRoomError):  # counted in memory until there is space
            self._files.save(USAGE, json.dumps({"format": 1, "day": self._day, **numbers}).encode())
        self._written = numbers

    def _load(self) -> tuple[str, dict[str, float]]:
        data = self._files.load(USAGE)
        if data is None:
            return self._today(), _zero()
        try:
            saved = json_object(self._files.directory / USAGE, data)
            return str(saved["day"]), {name: _check(saved[name]) for name in _STEPS}
        except (KeyError, TypeError, ValueError, StateError) as error:
            self._files.set_aside(USAGE, error, "the budgets of today count as used up")
            return self._today(), dict.fromkeys(_STEPS, sys.float_info.max)


def _zero() -> dict[str, float]:
    return dict.fromkeys(_STEPS, 0)


def _check(value: object) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return value


class Pace:
    """The time before which the device must not call the server.

    Args:
        files: The state directory.
        clock: The device's clock.
    """

    def __init__(self, files: Files, clock: Clock) -> None:
        self._files, self._clock = files, clock
        self._until = clock.now() + self._load()

    def set(self, seconds: float) -> None:
        """Stores that the device must not call for `seconds` seconds, at least 0."""
        self._until = self._clock.now() + seconds
        if seconds >= _SHORTEST_STORED_SECONDS:
            self._save(seconds)

    def remaining(self) -> float:
        """Returns the seconds to wait, at least 0."""
        return max(0.0, self._until - self._clock.now())

    def _save(self, seconds: float) -> None:
        saved = {"format": 1, "not_before": self._clock.time() + seconds, "seconds": seconds}
        with contextlib.suppress(NoRoomError):  # obeyed until a restart
            self._files.save(PACE, json.dumps(saved).encode())

    def _load(self) -> float:
        """Returns the seconds to wait; never more than the server requested, even if the system time was changed."""
        data = self._files.load(PACE)
        if data is None:
            return 0.0
        try:
            saved = json_object(self._files.directory / PACE, data)
            not_before, seconds = float(saved["not_before"]), float(saved["seconds"])
            if not (math.isfinite(not_before) and 0 <= seconds < math.inf):
                raise ValueError(f"not_before is {not_before} and seconds {seconds}, expected finite numbers")
        except (KeyError, TypeError, ValueError, StateError) as error:
            self._files.set_aside(PACE, error, "the device calls the server without a pause")
            return 0.0
        return min(not_before - self._clock.time(), seconds)
