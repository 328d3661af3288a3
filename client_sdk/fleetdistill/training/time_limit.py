"""A time limit for one ask on a device, regardless of what the server requests.

    with time_limit(3600):
        ...  # every loop of training or evaluation calls check_time

The limit applies to the current context. Without a limit, as on the server, `check_time` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fleetdistill.errors import CannotAnswer

_limit: ContextVar[tuple[float, float, Callable[[], float]] | None] = ContextVar(
    "fleetdistill_time_limit", default=None
)


@contextmanager
def time_limit(seconds: float, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Makes `check_time` raise after `seconds` seconds, measured with the clock `now`."""
    token = _limit.set((now() + seconds, seconds, now))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raises CannotAnswer if the current time limit has passed."""
    limit = _limit.get()
    if limit is not None and limit[2]() > limit[0]:
        raise CannotAnswer(
            f"the ask takes longer than this device's limit of {limit[1]:g} seconds; raise it with "
            "Device(max_seconds_per_ask=...), or lower the run's local epochs"
        )
