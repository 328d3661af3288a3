"""Whether the server can be reached: pauses between attempts, and events for the app."""

from __future__ import annotations

import random

from fleetdistill.clock import Clock
from fleetdistill.device.events import Events
from fleetdistill.errors import LinkError

_FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
"""Longest pause between two attempts to reach the server, in seconds, unless the server requests a longer one."""

_pauses = random.Random()  # the app may have seeded the generator of the module `random`


class Contact:
    """Tracks the contact with the server, and emits `lost-contact` and `contact-returned`.

    Args:
        events: Emits events to the app.
        clock: Clock that measures how long the contact was lost.
    """

    def __init__(self, events: Events, clock: Clock) -> None:
        self._events, self._clock = events, clock
        self._pause = _FIRST_PAUSE_SECONDS
        self._reason = ""  # the last reported error; empty while there is contact
        self._known = False  # whether the server has ever replied
        self._lost_at = 0.0

    def lost(self, error: LinkError) -> float:
        """Records a failed attempt; returns the seconds to wait before the next one, with exponential backoff.

        Emits one event for consecutive errors with the same text.
        """
        if not self._reason:
            self._lost_at = self._clock.now()
        if str(error) != self._reason:
            self._reason = str(error)
            first = "" if self._known else "no contact yet: "
            self._events.emit("lost-contact", 0, f"{first}{self._reason}; the device keeps trying")
        pause = error.after_seconds + _pauses.uniform(self._pause / 2, self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause

    def restored(self) -> None:
        """Records that the server replied; emits an event if the contact was lost."""
        if self._reason:
            self._reason = ""
            seconds = self._clock.now() - self._lost_at
            again = " again" if self._known else ""
            text = f"the server can be reached{again} after {seconds:.0f} seconds"
            self._events.emit("contact-returned", 0, text, {"seconds": seconds})
        self._known = True

    def reset_pause(self) -> None:
        """Makes the next pause short again, after a turn without an error."""
        self._pause = _FIRST_PAUSE_SECONDS
