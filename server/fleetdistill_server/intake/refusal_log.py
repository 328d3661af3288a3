"""Which refusals become events of a run."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

from fleetdistill.errors import RefusedError
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.intake.limiter import Allowance, Who
from fleetdistill_server.store.store import Store


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


class RefusalLog:
    """Writes refusals as events of their run.

    Args:
        commit: Runs a job in a durable transaction.
        per_hour: How many of a device become events; of more there is a count. None: all.
    """

    def __init__(self, commit: Commit, per_hour: int | None) -> None:
        self._commit = commit
        self._notes = RefusalNotes(per_hour)
        self._rows: dict[Who, int | None] = {}

    def note(self, run: str, number: int, device: str, refusal: RefusedError, *, known: bool = True) -> None:
        """Notes a refusal of a device; `known`: it is registered in the run."""
        if not self._notes.take(run, device if known else ""):
            return  # it is counted; see `note_left_out`
        self._commit(
            lambda store: store.history.add_event(
                run, "refused", str(refusal), number=number, device=device[:64], code=refusal.code
            )
        )

    def note_left_out(self) -> None:
        """Writes down how many refusals were left out, one event for each device; called now and then."""
        for who, count in self._notes.news().items():
            row = self._rows.get(who)
            self._rows[who] = self._commit(partial(_note_count, who, count, row))


def _note_count(who: Who, count: int, row: int | None, store: Store) -> int | None:
    run, device = who
    whose = f"of device {device}" if device else "of devices that are not registered"
    return store.history.note_refusals_left_out(run, device, f"{count} further refusals {whose} are only counted", row)
