"""Counts a run's guard events, and how often rounds replaced the apps' models or left them unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill.replacement import REPLACEMENT_METRICS, SPLIT
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Event
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class Replacements:
    """Numbers of app models that devices kept and replaced; only devices with validation data count."""

    kept: int
    replaced: int


def guard_events(store: Store, run: str) -> list[Event]:
    """Returns the events that the guards of the run's method wrote, oldest first."""
    return [event for event in store.history.events(run) if event.kind.endswith(GUARD)]


def replacement_rows(store: Store, run: str) -> list[Row]:
    """Returns the reported model replacements of a run; each row is one device's decision in one round."""
    return [row for name in REPLACEMENT_METRICS for row in store.history.figures(run, name, SPLIT)]


def count_replacements(rows: Sequence[Row]) -> Replacements:
    """Counts the rows of `replacement_rows`. Each row counts once, whatever sums and counts a device sends."""
    replaced = sum(row["sum"] > 0 for row in rows)
    return Replacements(kept=len(rows) - replaced, replaced=replaced)
