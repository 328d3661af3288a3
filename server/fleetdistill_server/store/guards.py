"""Joining must not hurt, counted: guards that fired, and the app models that rounds replaced or that apps kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill.replacement import REPLACEMENT_METRICS, SPLIT
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class Verdicts:
    """What became of app models: `kept` and `replaced` count the verdicts of devices that have validation data."""

    kept: int
    replaced: int


def guard_events(store: Store, run: str) -> list[Row]:
    """The events of a run that its method's guards wrote, oldest first."""
    return [row for row in store.history.events(run) if row["kind"].endswith(GUARD)]


def guards_by_round(store: Store, run: str) -> Counter[int]:
    """How often guards fired in each round."""
    return Counter(row["round"] for row in guard_events(store, run))


def verdict_rows(store: Store, run: str) -> list[Row]:
    """What devices reported about their apps' models; one row is one verdict."""
    return [row for name in REPLACEMENT_METRICS for row in store.history.figures(run, name, SPLIT)]


def verdicts(rows: Sequence[Row]) -> Verdicts:
    """Counts rows of `verdict_rows`, one for each decision whatever numbers a device may send."""
    replaced = sum(row["sum"] > 0 for row in rows)
    return Verdicts(kept=len(rows) - replaced, replaced=replaced)
