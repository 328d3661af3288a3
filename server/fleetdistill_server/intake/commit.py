"""Makes writes durable, each in its own transaction or in groups on the front's writer thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from fleetdistill_server.store.store import Store

T = TypeVar("T")


class Commit(Protocol):
    """Runs a job in a durable transaction and returns its result."""

    def __call__(self, job: Callable[[Store], T], /) -> T:
        """Runs the job and returns its result once its writes are on disk; propagates the job's exceptions."""


class DirectCommit:
    """Runs each job immediately in its own transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, job: Callable[[Store], T], /) -> T:
        with self._store.transaction():
            return job(self._store)
