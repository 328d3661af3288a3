"""Progress of a long training or inference, with the time left, as the reason in the run's status."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_SECONDS = 10.0
"""Minimum time between two reports, in seconds; also before the first one, so that short work reports nothing."""


class TrainingProgress:
    """Receiver of `fleetdistill.progress`.

    Args:
        report: Receives texts such as `training, 40 % done, about 12 min left`.
        now: Monotonic clock in seconds.
    """

    def __init__(self, report: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._phase = ""
        self._first = self._last = 0.0
        self._started = self._reported = now()

    def __call__(self, phase: str, fraction: float) -> None:
        now = self._now()
        if phase != self._phase or fraction < self._last:  # the next training
            self._phase, self._first, self._started, self._reported = phase, fraction, now, now
        self._last = fraction
        if now - self._reported >= INTERVAL_SECONDS and fraction > self._first:
            self._reported = now
            left = (now - self._started) * (1 - fraction) / (fraction - self._first)
            self._report(f"{phase}, {fraction:.0%} done, about {_duration(left)} left".replace("%", " %"))


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
