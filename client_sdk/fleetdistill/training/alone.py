"""Whether a computation shares its process with an app, whose settings of torch must then be protected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["without_app"]

_alone: ContextVar[bool] = ContextVar("fleetdistill_alone", default=False)


@contextmanager
def without_app() -> Iterator[None]:
    """Declares that the block runs in a process without an app, such as a simulation with a single thread.

    `in_own_thread` then uses the calling thread, and `own_randomness` the global generators, whose state it restores.
    Both give the same results as otherwise. The caller sets torch's number of threads.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    """Returns whether the calling code runs in a block of `without_app`."""
    return _alone.get()
