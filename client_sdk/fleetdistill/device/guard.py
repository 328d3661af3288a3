"""One thread at a time at a device's compute backend and identity, with no lock held while the app gets an event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetdistill.device.events import Event


class Guard:
    """A lock, and the app's callback: events of the thread that holds the lock wait until it is free.

    The callback may itself wait for another thread of the app that wants the model.

    Args:
        on_event: The app's callback, called in the thread that emits.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._queued: list[Event] = []
        self.on_event = on_event

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock; the same thread may hold it several times over."""
        due: list[Event] = []
        try:
            with self._lock:
                self._holder, self._depth = threading.get_ident(), self._depth + 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    if not self._depth:
                        self._holder, due, self._queued = None, self._queued, []
        finally:
            for event in due:
                self.on_event(event)

    def emit(self, event: Event) -> None:
        """Calls the app, now or when this thread releases the lock."""
        if self._holder == threading.get_ident():
            self._queued.append(event)
        else:
            self.on_event(event)
