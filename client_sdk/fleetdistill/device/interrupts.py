"""Ctrl-C in the main thread, without a traceback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
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
