"""Records refusals as events of a run, up to a limit per device and hour."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

from fleetdistill.errors import RefusedError
from fleetdistill_server.intake.limiter import Allowance, DeviceKey
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.store import Store


class RefusalQuota:
    """Limits the refusals per device and hour that become events, and counts the rest.

    All unregistered devices share one quota, so inventing device ids does not produce more events.
    """

    def __init__(self, per_hour: int | None) -> None:
        self._lock = threading.Lock()
        self._allowance = Allowance(per_hour) if per_hour is not None else None
        self._left_out: Counter[DeviceKey] = Counter()
        self._reported: Counter[DeviceKey] = Counter()

    def take(self, run: str, device: str) -> bool:
        """Returns whether to record this refusal; an empty `device` stands for all unregistered devices."""
        with self._lock:
            if self._allowance is None or not self._allowance.take((run, device)):
                return True
            self._left_out[run, device] += 1
            return False

    def changes(self) -> dict[DeviceKey, int]:
        """Returns the total of unrecorded refusals per device, for devices whose total grew since the last call."""
        with self._lock:
            grown = {key: count for key, count in self._left_out.items() if count > self._reported[key]}
            self._reported.update({key: count - self._reported[key] for key, count in grown.items()})
            return grown


class RefusalLog:
    """Records refusals as events of their run.

    Args:
        commit: Runs a job in a durable transaction.
        per_hour: Number of refusals per device and hour that become events; further ones are only counted. None
            records all.
    """

    def __init__(self, commit: Commit, per_hour: int | None) -> None:
        self._commit = commit
        self._quota = RefusalQuota(per_hour)
        self._rows: dict[DeviceKey, int | None] = {}

    def note(
        self, run: str, number: int, device: str, refusal: RefusedError, *, known: bool = True, ask: int = 0
    ) -> None:
        """Records a refusal.

        Args:
            run: Name of the run.
            number: Round; 0 for none.
            device: Device that was refused.
            refusal: The refusal.
            known: Whether the device is registered in the run.
            ask: Id of the ask that the device answered; 0 for none.
        """
        if not self._quota.take(run, device if known else ""):
            return  # counted instead; see `note_left_out`
        self._commit(
            lambda store: store.history.add_event(
                run, "refused", str(refusal), number=number, device=device[:64], code=refusal.code, ask=ask
            )
        )

    def note_left_out(self) -> None:
        """Records the numbers of unrecorded refusals, as one event per device; call periodically."""
        for key, count in self._quota.changes().items():
            row = self._rows.get(key)
            self._rows[key] = self._commit(partial(_note_count, key, count, row))


def _note_count(key: DeviceKey, count: int, row: int | None, store: Store) -> int | None:
    run, device = key
    whose = f"device {device}" if device else "unregistered devices"
    text = f"{count} further refusals of {whose} were counted but not recorded as events"
    return store.history.note_refusals_left_out(run, device, text, row)
