"""Reads what the trace of a round needs: when the run, the round and its asks began and ended."""

from __future__ import annotations

from fleetdistill_server.store.database import Database
from fleetdistill_server.store.records import Round


def created_at(database: Database, run: str) -> float | None:
    """Returns when a run was created, in seconds since 1970, or None for an unknown run."""
    result = database.value("SELECT created_at FROM runs WHERE name = ?", run)
    return None if result is None else float(result)


def ended_round(database: Database, run: str, number: int) -> Round | None:
    """Returns a round, or None unless it has ended."""
    row = database.row("SELECT * FROM rounds WHERE run = ? AND round = ? AND status <> 'open'", run, number)
    return None if row is None else Round.from_row(row)
