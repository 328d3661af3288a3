"""Reads what the trace of a round needs: when the run, the round and its asks began and ended."""

from __future__ import annotations

from fleetdistill_server.store.database import Database, Row


def created_at(database: Database, run: str) -> float | None:
    """Returns when a run was created, in seconds since 1970, or None for an unknown run."""
    found = database.value("SELECT created_at FROM runs WHERE name = ?", run)
    return None if found is None else float(found)


def ended_round(database: Database, run: str, number: int) -> Row | None:
    """Returns status, start and end of a round, or None unless it has ended."""
    return database.row(
        "SELECT status, started_at, ended_at FROM rounds WHERE run = ? AND round = ? AND status <> 'open'", run, number
    )
