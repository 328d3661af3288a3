"""One thread that writes, with group commit: many small transactions become one, so that one fsync serves them all.

Measured while the design was made: 30,000 durable receipts a second this way against 1,300 one by one.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from fleetdistill.errors import StoreError
from fleetdistill.state import failpoints
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.store import Store

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.commits")
# A pause between groups leaves the engine's commits room to get the write lock.
_PAUSE_SECONDS = 0.001
_LARGEST_GROUP = 500


class CommitThread:
    """Runs jobs on a store of its own, in order, and answers each once its group is on the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._afterwards: set[Callable[[], None]] = set()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="commits", daemon=True)
        self._thread.start()

    def commit(self, job: Callable[[Store], T]) -> T:
        """Runs a job in a transaction and waits until it is durable; raises what the job raises.

        A job of a call that runs on this thread joins the group that is open, and becomes durable with it.
        """
        if threading.current_thread() is self._thread:
            with self._store.transaction():
                return job(self._store)
        future: Future[T] = Future()
        self._hand_in(job, future)
        return future.result()

    def call(self, work: Callable[[], T]) -> Future[Callable[[], T]]:
        """Runs short work, whose commits join one group, on this thread, so that nobody else has to wait for them.

        Returns:
            A future that is done once all of it is durable. What it holds returns what the work returned, or raises
            what it raised.
        """
        future: Future[Callable[[], T]] = Future()
        future.set_running_or_notify_cancel()  # whoever waits for it may go away, the work is done all the same
        self._hand_in(lambda _: _outcome(work), future)
        return future

    def _hand_in(self, job: Callable[[Store], Any], future: Future[Any]) -> None:
        """Raises StoreError once the thread has been told to end: nobody would ever answer."""
        with self._closing:
            if self._closed:
                raise StoreError("the store is being closed; nothing is committed any more")
            self._jobs.put((job, future))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Runs an action once what the caller has committed is durable: at once, or after the group of its call."""
        if threading.current_thread() is self._thread:
            self._afterwards.add(action)
        else:
            action()

    def close(self) -> None:
        """Finishes what was handed in and ends the thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        """Without this thread every call would wait for ever, so the process does not outlive it."""
        try:
            while self._work_once():
                time.sleep(_PAUSE_SECONDS)
        except BaseException:
            logger.critical("the commit thread failed; the process ends, to be started again", exc_info=True)
            os._exit(1)

    def _work_once(self) -> bool:
        """Commits one group; False once the thread is to end."""
        group = self._group()
        jobs = [one for one in group if one is not None]
        self._run(jobs)
        while self._afterwards:
            _do(self._afterwards.pop())
        return len(jobs) == len(group)

    def _group(self) -> list[tuple[Callable[[Store], Any], Future[Any]] | None]:
        group = [self._jobs.get()]
        while len(group) < _LARGEST_GROUP:
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
        except Exception as error:  # such as no memory at the commit: nothing is durable, and nobody may wait for ever
            failure = error if isinstance(error, StoreError) else StoreError(f"committing: {error!r}")
            failure.__cause__ = None if failure is error else error
            for _, future in jobs:
                future.set_exception(failure)
            return
        for settle in results:
            settle()

    def _one(self, job: Callable[[Store], Any], future: Future[Any]) -> Callable[[], None]:
        """A job that fails rolls back to its own savepoint; the others of the group go on."""
        try:
            with self._store.transaction():
                result = job(self._store)
        except Exception as error:  # whatever it is, it belongs to the caller that waits for it
            failure = error
            return lambda: future.set_exception(failure)
        return lambda: future.set_result(result)


def _do(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # what was committed stands; a wake-up that is lost costs time only
        logger.exception("what follows a commit failed")


def _outcome(work: Callable[[], T]) -> Callable[[], T]:
    """Does the work; an error does not take back what the work has committed, such as a note about it."""
    try:
        result = work()
    except Exception as error:
        failure = error
        return lambda: _raise(failure)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error
