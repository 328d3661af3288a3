"""A clock and a link for tests of what a device does while it waits."""

from __future__ import annotations

import threading
from typing import Any

from support.hostile_server import LyingLink
from support.processes import PATIENCE_SECONDS

from fleetdistill.errors import LinkError
from fleetdistill.testing import ManualClock


class Ticking(ManualClock):
    """A quarter of a second passes each time that somebody looks."""

    def now(self) -> float:
        self.advance(0.25)
        return super().now()


class WaitingLink(LyingLink):
    """Holds every request for work until `interrupt`, like a server without work."""

    def __init__(self, *asks: Any) -> None:
        super().__init__(*asks)
        self.polling, self.interrupted = threading.Event(), threading.Event()

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        if self.asks:
            return super().next_ask(identity, wait_seconds)
        self.polling.set()
        assert self.interrupted.wait(PATIENCE_SECONDS)
        self.interrupted.clear()
        self.polling.clear()
        raise LinkError("the call was cancelled")

    def interrupt(self) -> None:
        if self.polling.is_set():
            self.interrupted.set()
