"""A bound on the time that one ask may take, however much a server asks for.

    with time_limit(3600):
        ...  # every loop of training or evaluation calls check_time

It holds in the thread that set it. Without one, such as on the server, `check_time` does nothing.
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
    """Lets `check_time` raise once so many seconds have passed by the clock `now`."""
    token = _limit.set((now() + seconds, seconds, now))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raises CannotAnswer where the time is over."""
    limit = _limit.get()
    if limit is not None and limit[2]() > limit[0]:
        raise CannotAnswer(
            f"the ask takes longer than the {limit[1]:g} seconds that this device gives one: allow more with "
            "Device(max_seconds_per_ask=...), or ask for fewer local epochs"
        )
