"""Asks that outlive their round in a run with buffered rounds: open ones, and answers that no round has used yet."""

from __future__ import annotations

import json

from fleetdistill_server.store.asks import Asks
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import MAX_STALENESS, STALENESS
from fleetdistill_server.store.sums import Sums


def settle(db: Database, run: str, first: int, last: int, unused: str) -> None:
    """Closes the open asks of rounds and reports their unused answers with a reason."""
    rounds = (run, first, last)
    db.write(
        "UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'acknowledged' "
        "AND ask IN (SELECT id FROM asks WHERE run = ? AND round >= ? AND round <= ?)",
        *(unused, *rounds),
    )
    db.write(
        "UPDATE asks SET status = 'out', reason = 'round closed' "
        "WHERE run = ? AND round >= ? AND round <= ? AND status = 'open'",
        *rounds,
    )


def settle_until(db: Database, run: str, last: int, unused: str) -> None:
    """Settles all asks up to a round, and adds the rounds that are settled now to the sums."""
    with db.transaction():
        settle(db, run, last - MAX_STALENESS, last, unused)
        Sums(db).add_settled(run, last)


def report_late_answers(db: Database, run: str, number: int, why: str) -> None:
    """Reports the answers to asks of earlier rounds that the rounds after `number` used."""
    for row in db.rows("SELECT round, figures FROM rounds WHERE run = ? AND round > ?", run, number):
        for device, age in json.loads(row["figures"] or "{}").get(STALENESS, {}).items():
            db.write(
                "UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'used' "
                "AND ask IN (SELECT id FROM asks WHERE run = ? AND round = ? AND device = ?)",
                *(why, run, row["round"] - age, device),
            )


def first_needed_round(asks: Asks, run: Run, first: int) -> int:
    """Returns the first round with an unsettled ask of a run, or `first` if that is earlier."""
    if not run.config.get("run", {}).get("buffer_answers"):
        return first
    result = asks.first_unsettled(run.name, first - MAX_STALENESS, first)
    return first if result is None else min(first, result)
