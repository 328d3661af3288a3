"""Interrupts work on a device: every loop of training, evaluation, upload and download calls `check_may_continue`.

    with check_with(check):
        ...  # `check` raises an error when the work must end

Checks apply to the current context. Without one, as on the server, `check_may_continue` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fleetdistill.errors import CannotAnswer, WorkInterrupted

__all__ = ["Hold", "time_limit"]

Check = Callable[[], None]
"""Function that returns if the work may continue, and raises an error otherwise."""
_SLICE_SECONDS = 0.1

_checks: ContextVar[tuple[Check, ...]] = ContextVar("fleetdistill_checks", default=())


@dataclass(frozen=True)
class Hold:
    """Why a device must not work now.

    Attributes:
        condition: Name of the condition, such as `charging`, `bytes_per_day` or `stopped`.
        text: Description, without a final stop.
        seconds: Seconds until the condition can hold again; None if unknown, infinite if waiting does not help.
    """

    condition: str
    text: str
    seconds: float | None = None

    def error(self) -> WorkInterrupted:
        """Returns the error that interrupts work."""
        return WorkInterrupted(self.text, self.condition, self.seconds)


@contextmanager
def check_with(check: Check) -> Iterator[None]:
    """Adds a check that `check_may_continue` calls within the block."""
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


@contextmanager
def time_limit(seconds: float, now: Callable[[], float] = time.monotonic) -> Iterator[Check]:
    """Makes `check_may_continue` raise CannotAnswer after `seconds` seconds, measured with the clock `now`.

    Yields the check of this limit alone, for the end of work that has only few checks.
    """
    end = now() + seconds

    def check() -> None:
        if now() > end:
            raise CannotAnswer(
                f"the ask takes longer than this device's limit of {seconds:g} seconds; raise it with "
                "Budgets(seconds_per_ask=...), or lower the run's local epochs"
            )

    with check_with(check):
        yield check


def check_may_continue() -> None:
    """Returns if the work of the current context may continue.

    Raises:
        CannotAnswer: The time limit has passed.
        WorkInterrupted: The app stopped the device, or its eligibility or budgets no longer allow the work.
    """
    for check in _checks.get():
        check()


def bound_check() -> Check:
    """Returns `check_may_continue` for the current context, to be called from any thread."""
    checks = _checks.get()

    def check() -> None:
        for check in checks:
            check()

    return check


def pause(seconds: float) -> None:
    """Sleeps; raises the errors of `check_may_continue` at most 0.1 seconds after the work must end."""
    end = time.monotonic() + seconds
    check_may_continue()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_SECONDS))
        check_may_continue()
