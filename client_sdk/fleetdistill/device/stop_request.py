"""A request to stop, which a signal handler may make at any moment."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue


class StopRequest(threading.Event):
    """Event for one waiting thread that can be set in a signal handler.

    A handler that sets a plain `threading.Event` deadlocks if it interrupts its own thread within `wait`, which holds
    a lock that is not reentrant. `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requested = False
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

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until a stop is requested or `timeout` seconds have passed; returns whether it was requested."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._requested:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            try:
                self._wake_ups.get(timeout=left)  # may return at once for a request that was withdrawn
            except Empty:
                break
        return self._requested
