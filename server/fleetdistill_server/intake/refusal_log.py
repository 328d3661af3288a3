"""Which refusals become events of a run."""

from __future__ import annotations

import threading
from collections import Counter

from fleetdistill_server.intake.limiter import Allowance, Who


class RefusalNotes:
    """Which refusals become events: so many of a device an hour; of more there is a count.

    Whoever is not registered shares one allowance with all others of the kind, so ids cost nothing.
    """

    def __init__(self, per_hour: int | None) -> None:
        self._lock = threading.Lock()
        self._allowance = Allowance(per_hour) if per_hour is not None else None
        self._left_out: Counter[Who] = Counter()
        self._told: Counter[Who] = Counter()

    def take(self, run: str, device: str) -> bool:
        """Whether to note a refusal of this device; the empty name stands for all that are not registered."""
        with self._lock:
            if self._allowance is None or not self._allowance.take((run, device)):
                return True
            self._left_out[run, device] += 1
            return False

    def news(self) -> dict[Who, int]:
        """How many were left out, of the devices for which that has grown since the last time."""
        with self._lock:
            grown = {who: count for who, count in self._left_out.items() if count > self._told[who]}
            self._told.update({who: count - self._told[who] for who, count in grown.items()})
            return grown
