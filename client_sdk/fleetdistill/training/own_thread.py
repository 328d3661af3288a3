"""Runs computations in a thread whose settings of torch are separate from the app's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import TypeVar

import torch

from fleetdistill.errors import WorkInterrupted
from fleetdistill.interruption import check_with
from fleetdistill.progress import redirect
from fleetdistill.training.alone import is_alone

T = TypeVar("T")

_setting_threads = threading.Lock()


def in_own_thread(function: Callable[[], T], threads: int) -> T:
    """Returns the result of a function that runs in a new thread with a number of compute threads of its own.

    The thread also has torch's default modes: gradients enabled, no inference mode, autocast or default device. Other
    threads keep their settings.

    Args:
        function: Function of the SDK or the app. It runs in a copy of the current context; the calling thread receives
            its reports of progress.
        threads: Number of threads that an operation of torch may use, at least 1.

    Raises:
        BaseException: The exception of `function`. If the calling thread is interrupted, the function ends at its next
            `check_may_continue`, and the interruption is raised.
    """
    if is_alone():
        with torch.enable_grad():
            return function()
    result: Future[T] = Future()
    abandoned = threading.Event()
    reports: SimpleQueue[tuple[str, float] | None] = SimpleQueue()  # None at the end
    receiver = redirect(lambda phase, fraction: reports.put((phase, fraction)))

    def check() -> None:
        if abandoned.is_set():
            raise WorkInterrupted("the calling thread was interrupted", "interrupted")

    def work() -> None:
        try:
            set_threads(threads)
            with check_with(check):
                result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
        finally:
            reports.put(None)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="fleetdistill compute", daemon=True)
    thread.start()
    try:
        while (report := reports.get()) is not None:
            receiver(*report)
        return result.result()
    except BaseException:
        abandoned.set()
        thread.join()
        raise
    finally:
        redirect(receiver)


def set_threads(threads: int) -> None:
    """Sets the number of compute threads of the calling thread, which must be new.

    torch has a setting for each thread, and a common one for threads that have not used torch yet. `set_num_threads`
    changes both; another thread changes the common one back.
    """
    with _setting_threads:
        common = torch.get_num_threads()  # of a new thread; it also prevents that torch applies the common one later
        if threads != common:
            torch.set_num_threads(threads)
            restoring = threading.Thread(target=torch.set_num_threads, args=(common,))
            restoring.start()
            restoring.join()
