"""Progress of work on a device: every loop of training and evaluation calls `report_progress`.

    with report_to(show):
        ...  # calls show("training", 0.25) at most once per second

Applies to the current context. Without a receiver, as on the server, `report_progress` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["redirect"]

INTERVAL_SECONDS = 1.0
"""Minimum time between two reports, in seconds; also before the first one, so that short work reports nothing."""

Receiver = Callable[[str, float], None]
"""Function of the phase and of the fraction of it that is done."""


class _Reports:
    def __init__(self, receiver: Receiver, now: Callable[[], float]) -> None:
        self.receiver = receiver
        self._now = now
        self._last = now()

    def report(self, phase: str, fraction: float) -> None:
        now = self._now()
        if now - self._last >= INTERVAL_SECONDS:
            self._last = now
            self.receiver(phase, fraction)


_reports: ContextVar[_Reports | None] = ContextVar("fleetdistill_progress", default=None)


@contextmanager
def report_to(receiver: Receiver, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Makes `report_progress` in the block call `receiver`, at most once per second of the clock `now`."""
    token = _reports.set(_Reports(receiver, now))
    try:
        yield
    finally:
        _reports.reset(token)


def redirect(receiver: Receiver) -> Receiver:
    """Sends the reports of the current context to another receiver from now on; returns the previous one."""
    reports = _reports.get()
    if reports is None:
        return receiver
    previous, reports.receiver = reports.receiver, receiver
    return previous


def report_progress(phase: str, fraction: float) -> None:
    """Reports the progress of the current work.

    Args:
        phase: `training`, or `inference` for features and scores.
        fraction: Completed part of the phase, in [0, 1].
    """
    reports = _reports.get()
    if reports is not None:
        reports.report(phase, fraction)
