"""Group commit: one writer thread combines many small transactions, so that they share one fsync.

Measured during design: 30,000 durable receipts per second, compared with 1,300 with one transaction each.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol, TypeVar

from fleetdistill.errors import StoreError
from fleetdistill.state import failpoints
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.store import Store

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.commits")
# The pause between groups lets the engine's commits acquire the write lock.
_PAUSE_SECONDS = 0.001
_MAX_GROUP = 500


class Commit(Protocol):
    """Runs a job in a durable transaction and returns its result."""

    def __call__(self, job: Callable[[Store], T], /) -> T:
        """Runs the job and returns its result once its writes are on disk; propagates the job's exceptions."""


class CommitThread:
    """Runs jobs in order on a separate store connection and completes each when its group is durable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._after_commit: set[Callable[[], None]] = set()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="commits", daemon=True)
        self._thread.start()

    def commit(self, job: Callable[[Store], T]) -> T:
        """Runs a job in a transaction, waits until the transaction is durable, and returns the job's result.

        If the job raises an error, the transaction is rolled back and the error is raised here.
        A job submitted from this thread joins the open group and becomes durable with it.
        """
        if threading.current_thread() is self._thread:
            with self._store.transaction():
                return job(self._store)
        future: Future[T] = Future()
        self._enqueue(job, future)
        return future.result()

    def call(self, work: Callable[[], T]) -> Future[Callable[[], T]]:
        """Runs a short function on this thread without blocking the caller; its commits join one group.

        Returns:
            A future that completes when the commits are durable. Its result is a function that returns what `work`
            returned or raises what it raised.
        """
        future: Future[Callable[[], T]] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: the work runs even if the waiting call ends
        self._enqueue(lambda _: _outcome(work), future)
        return future

    def _enqueue(self, job: Callable[[Store], Any], future: Future[Any]) -> None:
        """Queues a job. Raises StoreError once the thread is closing, because the job would never complete."""
        with self._closing:
            if self._closed:
                raise StoreError("the store is closing and accepts no further changes")
            self._jobs.put((job, future))

    def after_commit(self, action: Callable[[], None]) -> None:
        """Runs an action once the caller's commits are durable: after its group on this thread, else immediately."""
        if threading.current_thread() is self._thread:
            self._after_commit.add(action)
        else:
            action()

    def close(self) -> None:
        """Completes the queued jobs and ends the thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        """Runs until closed. A failure ends the process, because every later call would wait forever."""
        try:
            while self._work_once():
                time.sleep(_PAUSE_SECONDS)
        except BaseException:
            logger.critical("the commit thread failed; the process exits so that it can be restarted", exc_info=True)
            os._exit(1)

    def _work_once(self) -> bool:
        """Commits one group; returns False when the thread must end."""
        group = self._group()
        jobs = [item for item in group if item is not None]
        self._run(jobs)
        self._store.database.meter.grouped(len(jobs))
        while self._after_commit:
            _run_action(self._after_commit.pop())
        return len(jobs) == len(group)

    def _group(self) -> list[tuple[Callable[[Store], Any], Future[Any]] | None]:
        group = [self._jobs.get()]
        while len(group) < _MAX_GROUP:
            try:
                group.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return group

    def _run(self, jobs: list[tuple[Callable[[Store], Any], Future[Any]]]) -> None:
        results: list[Callable[[], None]] = []
        try:
            with disk_errors("committing"):
                with self._store.transaction():
                    for job, future in jobs:
                        results.append(self._one(job, future))
                    failpoints.hit("front.commit.before")
                failpoints.hit("front.commit.after")
        except Exception as error:  # nothing is durable; callers must not wait forever
            failure = error if isinstance(error, StoreError) else StoreError(f"committing: {error!r}")
            failure.__cause__ = None if failure is error else error
            for _, future in jobs:
                future.set_exception(failure)
            return
        for settle in results:
            settle()

    def _one(self, job: Callable[[Store], Any], future: Future[Any]) -> Callable[[], None]:
        """Runs a job in a savepoint, so that its failure does not affect the other jobs of the group."""
        try:
            with self._store.transaction():
                result = job(self._store)
        except Exception as error:  # any error is raised in the waiting caller
            failure = error
            return lambda: future.set_exception(failure)
        return lambda: future.set_result(result)


def _run_action(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # the commit stands; a lost wake-up only adds a delay
        logger.exception("an action that runs after a commit failed")


def _outcome(work: Callable[[], T]) -> Callable[[], T]:
    """Runs the work and returns a function that returns its result or raises its error.

    An error does not roll back what the work has committed.
    """
    try:
        result = work()
    except Exception as error:
        failure = error
        return lambda: _raise(failure)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error
