"""Keeps a device from working while it must not, and reports this to app and server."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

from fleetdistill.device.events import Events
from fleetdistill.device.permission import seconds_to_wait
from fleetdistill.device.session import Session
from fleetdistill.errors import FleetDistillError, LinkError, WorkInterrupted

_SHORTEST_REPORTED_SECONDS = 1.0


class Manners:
    """Applies a device's `Permission` to its turns.

    Args:
        session: State of the open device.
        events: Emits events to the app.
        stopped: Set when the app stops the device.
    """

    def __init__(self, session: Session, events: Events, stopped: threading.Event) -> None:
        self._session = session
        self._events = events
        self._stopped = stopped
        self._permission = session.permission
        self._waits_for = ""  # condition of the last event `waiting`; empty after `resumed`
        self._present = False  # whether the server may expect the device to take part

    def seconds_to_wait(self) -> float:
        """Returns how long to wait before the next check if the device must not work now, or 0 if it may."""
        hold = self._permission.hold()
        if hold is None:
            self._emit_resumed()
            return 0.0
        if hold.seconds is None or hold.seconds >= _SHORTEST_REPORTED_SECONDS:
            self._emit_waiting(hold.condition, hold.text, hold.seconds)
        if hold.condition != "pace":
            self._leave()
        return seconds_to_wait(hold)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Interrupts the work in the block when it must end; emits the reason unless the app stopped the device.

        Stores how long the server requests to wait before the next call.
        """
        self._present = True
        try:
            with self._permission.working(self._stopped, self._session.link):
                yield
        except WorkInterrupted as reason:
            if reason.condition != "stopped":
                self._emit_waiting(reason.condition, str(reason), reason.seconds)
            raise
        except LinkError as error:
            self._permission.pace.set(error.after_seconds)
            raise

    def _emit_waiting(self, condition: str, text: str, seconds: float | None) -> None:
        if condition == self._waits_for:
            return
        self._waits_for = condition
        known = {} if seconds is None or math.isinf(seconds) else {"seconds": seconds}
        self._events.emit("waiting", 0, f"{text}; the device waits", {"condition": condition, **known})

    def _emit_resumed(self) -> None:
        if self._waits_for:
            condition, self._waits_for = self._waits_for, ""
            text = f"the device no longer waits for {condition}"
            self._events.emit("resumed", 0, text, {"condition": condition})

    def _leave(self) -> None:
        """Notifies the server once that the device does not take part for now, unless it still owes an answer."""
        owes = self._session.ask_interrupted or self._session.storage.outbox.pending() is not None
        if self._session.terms is None or owes or not self._present:
            return
        self._present = False
        with contextlib.suppress(FleetDistillError):
            self._session.link.leave(self._session.identity)
