"""The server's request to call again later, in `pace.json`, so that a restarted device obeys it too."""

from __future__ import annotations

import contextlib
import json
import math

from fleetdistill.clock import Clock
from fleetdistill.errors import NoRoomError, StateError
from fleetdistill.state.files import Files
from fleetdistill.state.format import json_object

PACE = "pace.json"
_SHORTEST_STORED_SECONDS = 1.0
"""Shorter pauses end before a restarted process can call; an idle device does not write to the disk for them."""


class Pace:
    """The time before which the device must not call the server.

    Args:
        files: The state directory.
        clock: The device's clock.
    """

    def __init__(self, files: Files, clock: Clock) -> None:
        self._files, self._clock = files, clock
        self._until = clock.now() + self._load()

    def set(self, seconds: float) -> None:
        """Stores that the device must not call for `seconds` seconds, at least 0."""
        self._until = self._clock.now() + seconds
        if seconds >= _SHORTEST_STORED_SECONDS:
            self._save(seconds)

    def remaining(self) -> float:
        """Returns the seconds to wait, at least 0."""
        return max(0.0, self._until - self._clock.now())

    def _save(self, seconds: float) -> None:
        saved = {"format": 1, "not_before": self._clock.time() + seconds, "seconds": seconds}
        with contextlib.suppress(NoRoomError):  # obeyed until a restart
            self._files.save(PACE, json.dumps(saved).encode())

    def _load(self) -> float:
        """Returns the seconds to wait; never more than the server requested, even if the system time was changed."""
        data = self._files.load(PACE)
        if data is None:
            return 0.0
        try:
            saved = json_object(self._files.directory / PACE, data)
            not_before, seconds = float(saved["not_before"]), float(saved["seconds"])
            if not (math.isfinite(not_before) and 0 <= seconds < math.inf):
                raise ValueError(f"not_before is {not_before} and seconds {seconds}, expected finite numbers")
        except (KeyError, TypeError, ValueError, StateError) as error:
            self._files.set_aside(PACE, error, "the device calls the server without a pause")
            return 0.0
        return min(not_before - self._clock.time(), seconds)
