"""Ctrl-C in the main thread, without a traceback, and a request to stop that a signal handler may make at any time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


P = ParamSpec("P")
S = TypeVar("S", bound=_Closes)


@contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[list[int]]:
    """Calls `action` at the first Ctrl-C in the block instead of raising KeyboardInterrupt; the next one raises it.

    Changes nothing in other threads than the main one, or if the app has its own handler for SIGINT.

    Yields:
        The number of the signal, after Ctrl-C; an empty list before.
    """
    pressed: list[int] = []
    if not _python_handles_ctrl_c():
        yield pressed
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.append(number)
        action()

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def delays_ctrl_c(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Makes a constructor complete before it raises KeyboardInterrupt, if Ctrl-C is pressed once while it runs."""

    @wraps(init)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with on_ctrl_c(lambda: None) as pressed:
            init(self, *args, **kwargs)
        if pressed:
            self.close()
            raise KeyboardInterrupt

    return wrapped


def _python_handles_ctrl_c() -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class StopRequest(threading.Event):
    """Event for one waiting thread that can be set in a signal handler.

    A handler that sets a plain `threading.Event` deadlocks if it interrupts its own thread within `wait`, which holds
    a lock that is not reentrant. `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requested = False
        self._woken = False
        self._wake_ups: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Returns whether a stop was requested and not cleared since."""
        return self._requested

    def set(self) -> None:
        """Requests a stop and ends a current `wait`."""
        self._requested = True
        self._wake_ups.put(None)

    def clear(self) -> None:
        """Withdraws the request."""
        self._requested = False

    def wake(self) -> None:
        """Ends a current `wait`, or else the next one, without a request to stop."""
        self._woken = True
        self._wake_ups.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until a stop is requested, `wake` or `timeout` seconds; returns whether a stop was requested."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (self._requested or self._woken):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            try:
                self._wake_ups.get(timeout=left)  # may return at once for a request that was withdrawn
            except Empty:
                break
        self._woken = False
        return self._requested
