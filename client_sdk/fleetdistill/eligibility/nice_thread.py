"""Runs computations at a lower priority, without affecting the app's threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from fleetdistill.interruption import Hold, checked_by

T = TypeVar("T")


def run_with_niceness(niceness: int | None, work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in a thread of its own with a niceness; in the calling thread with None.

    Linux has a niceness per thread, and a process without privileges cannot lower it again. Threads that `work` starts,
    such as those of OpenMP, inherit it. If the wait for the thread ends with an exception, such as KeyboardInterrupt,
    the work is interrupted first.

    Args:
        niceness: 1 to 19; Linux only.
        work: Function that calls `fleetdistill.interruption.check_may_continue`.
    """
    if niceness is None:
        return work()
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise Hold("stopped", "the wait for the computation was interrupted").error()

    with ThreadPoolExecutor(1, "fleetdistill compute", initializer=_set_niceness, initargs=(niceness,)) as executor:
        with checked_by(check):
            future = executor.submit(copy_context().run, work)
        try:
            return future.result()
        except BaseException:
            given_up.set()
            raise


def _set_niceness(niceness: int) -> None:
    current = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(current, niceness))
