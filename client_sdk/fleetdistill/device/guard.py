"""The lock of a device's compute backend and identity, and event callbacks that run without the lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.printable import printable

if TYPE_CHECKING:
    from fleetdistill.device.events import Event

logger = logging.getLogger(__name__)

_CALLBACK_FAILED = "callback-failed"


class Guard:
    """A reentrant lock, and the app's event callback, which never runs while the calling thread holds the lock.

    Otherwise a callback that waits for another thread of the app that reads the model would deadlock. An exception of
    the callback is logged and reported to it once; only KeyboardInterrupt and SystemExit pass.

    Args:
        on_event: Callback of the app, called in the emitting thread.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._queued: list[Event] = []
        self.on_event = on_event

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock in the block, then calls the app with the events emitted in the meantime. Reentrant."""
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
                self._call(event)

    def emit(self, event: Event) -> None:
        """Calls the app immediately, or when this thread releases the lock."""
        if self._holder == threading.get_ident():
            self._queued.append(event)
        else:
            self._call(event)

    def _call(self, event: Event) -> None:
        try:
            self.on_event(event)
        except (Exception, *CONTROL_FLOW) as error:
            logger.exception("on_event failed for the event %r; the device goes on", event.kind)
            if event.kind == _CALLBACK_FAILED:
                return
            from fleetdistill.device.events import Event  # which imports this module

            text = f"on_event failed for the event {event.kind!r} with {type(error).__name__}: {printable(str(error))}"
            values = {"event": event.kind, "error": type(error).__name__}
            self.emit(Event("callback-failed", event.round, text, values, event.rounds))
