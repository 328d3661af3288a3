"""How writes become durable: in a transaction of their own, or with others by the front's writer thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from fleetdistill_server.store.store import Store

T = TypeVar("T")


class Commit(Protocol):
    """Runs a job in a durable transaction and returns its result."""

    def __call__(self, job: Callable[[Store], T], /) -> T:
        """Returns once the job's writes are on the disk; raises what the job raises."""


class DirectCommit:
    """Runs a job in a transaction of its own, at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, job: Callable[[Store], T], /) -> T:
        with self._store.transaction():
            return job(self._store)
