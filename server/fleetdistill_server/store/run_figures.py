"""The present figures of runs, in few statements whose cost does not grow with the number of rounds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.states import OVER, RunStatus, sql_list


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run.

    Attributes:
        name, status, config, completed_rounds: As in the table `runs`.
        present: Number of devices that are checked in.
        asks: Number of asks by state: all that are open, and those of the newest round that are answered or out.
        short_rounds: Number of consecutive short rounds up to now.
        unfinished_since: When the first round since the last completed one began, in seconds since 1970; None if none
            has.
        last_ended_at: When the last completed round ended; None before it.
        last_seconds: Its duration in seconds.
        server_accuracy: Accuracy of the server's model after it, in [0, 1]; None without evaluation data.
        reported: Mean over the devices of what they reported for it, by name (accuracy, loss) and split.
    """

    name: str
    status: RunStatus
    config: dict[str, Any]
    completed_rounds: int
    present: int
    asks: dict[str, int]
    short_rounds: int
    unfinished_since: float | None
    last_ended_at: float | None
    last_seconds: float | None
    server_accuracy: float | None
    reported: dict[tuple[str, str], float]


def run_figures(db: Database, most: int) -> list[RunFigures]:
    """Returns the figures of at most `most` runs: the newest of those that have not ended, then of the others."""
    rows = db.rows(
        "SELECT name, status, config, completed_rounds, next_round FROM runs "
        f"ORDER BY CASE WHEN status IN ({sql_list(OVER)}) THEN 1 ELSE 0 END, created_at DESC, name LIMIT ?",
        most,
    )
    return [_figures_of(db, row) for row in rows]


def _figures_of(db: Database, row: Row) -> RunFigures:
    name = row["name"]
    last = db.row(
        "SELECT round, started_at, ended_at, figures FROM rounds WHERE run = ? AND status = 'closed' "
        "ORDER BY round DESC LIMIT 1",
        name,
    )
    since = last["round"] if last else 0
    later = db.row(
        "SELECT min(started_at) AS begun, count(*) FILTER (WHERE status = 'short') AS short FROM rounds "
        "WHERE run = ? AND round > ? AND status IN ('open', 'short')",
        *(name, since),
    )
    return RunFigures(
        name=name,
        status=RunStatus(row["status"]),
        config=json.loads(row["config"]),
        completed_rounds=row["completed_rounds"],
        present=int(db.value("SELECT count(*) FROM devices WHERE run = ? AND present = 1", name)),
        asks=_asks(db, name, row["next_round"] - 1),
        short_rounds=later["short"] if later else 0,
        unfinished_since=later["begun"] if later else None,
        last_ended_at=last["ended_at"] if last else None,
        last_seconds=last["ended_at"] - last["started_at"] if last else None,
        server_accuracy=_server_accuracy(last),
        reported=_reported(db, name, since) if last else {},
    )


def _asks(db: Database, run: str, newest: int) -> dict[str, int]:
    count = "SELECT count(*) FROM asks WHERE run = ? AND"
    return {
        "open": int(db.value(f"{count} status = 'open'", run)),
        "answered": int(db.value(f"{count} round = ? AND status = 'answered'", run, newest)),
        "out": int(db.value(f"{count} round = ? AND status = 'out'", run, newest)),
    }


def _server_accuracy(last: Row | None) -> float | None:
    figures: dict[str, Any] = json.loads(last["figures"] or "{}") if last else {}
    found = figures.get("global_accuracy")
    return float(found) if isinstance(found, int | float) else None


def _reported(db: Database, run: str, number: int) -> dict[tuple[str, str], float]:
    rows = db.rows(
        "SELECT name, split, avg(sum / count) AS mean FROM figures WHERE run = ? AND round = ? AND count > 0 "
        "AND name IN ('accuracy', 'loss') AND split IN ('train', 'test') GROUP BY name, split",
        *(run, number),
    )
    return {(row["name"], row["split"]): row["mean"] for row in rows}


def run_counts(db: Database) -> dict[str, int]:
    """Returns the number of runs by status."""
    rows = db.rows("SELECT status, count(*) AS runs FROM runs GROUP BY status")
    return {row["status"]: row["runs"] for row in rows}
