"""The time during which a database on another machine cannot be reached; logged when it begins and when it ends."""

from __future__ import annotations

import logging
import math
import time

logger = logging.getLogger("fleetdistill.server.store")
_PAUSE_SECONDS = 1.0


class Outage:
    """The current outage of a database, if any. Not thread-safe.

    Attributes:
        reason: The latest error; empty without an outage.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._since = 0.0
        self._tried = -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the database was lost; 0 without an outage."""
        return time.monotonic() - self._since if self.reason else 0.0

    def may_try(self) -> bool:
        """Returns whether to try to connect now, and counts the attempt: at most one per second."""
        now = time.monotonic()
        if now - self._tried < _PAUSE_SECONDS:
            return False
        self._tried = now
        return True

    def note(self, reason: str) -> None:
        """Records a failed attempt; the first one begins the outage."""
        if not self.reason:
            self._since = time.monotonic()
            logger.warning("the database is not available; retrying: %s", reason)
        self.reason = reason

    def end(self) -> None:
        """Ends the outage, if any."""
        if self.reason:
            logger.warning("the database is available again after %.1f s", self.seconds)
            self.reason = ""
