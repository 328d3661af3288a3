"""Progress of a run, as read by `Runs.progress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetdistill_server.store.sums import ANSWERS_OF_ROUNDS, BYTES_OF_ROUNDS, FIGURES_OF_ROUNDS

_DIGITS = {"test_accuracy": 4, "seconds": 2}


@dataclass(frozen=True)
class Progress:
    """Snapshot of a run's progress, as plain rows.

    Attributes:
        run: run, method, status, reason, completed_rounds, wanted_rounds (None to run until stopped), and the number of
            present devices.
        rounds: All rounds: status, number of devices and answers, how the answers were used, figures, and bytes on the
            link.
        steps: Steps of the newest round: how many devices were asked, have answered, and are out.
        events: Events that are newer than the event given by the caller.
    """

    run: dict[str, Any]
    rounds: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]


RUN_PROGRESS = (
    "SELECT name AS run, status, reason, completed_rounds, config, "
    "(SELECT count(*) FROM devices WHERE run = name AND present = 1) AS present FROM runs WHERE name = ?"
)
ROUND_PROGRESS = (
    f"WITH answers AS (SELECT * FROM {ANSWERS_OF_ROUNDS}), "
    "sent AS (SELECT round, sum(sent_bytes) FILTER (WHERE direction = 'up') AS up, "
    f"sum(sent_bytes) FILTER (WHERE direction = 'down') AS down FROM {BYTES_OF_ROUNDS} GROUP BY round), "
    "guards AS (SELECT round, count(*) AS fired FROM events WHERE run = ?1 AND kind LIKE '%-guard' GROUP BY round), "
    f"scores AS (SELECT round, mean FROM {FIGURES_OF_ROUNDS} WHERE name = 'accuracy' AND split = 'test') "
    "SELECT r.round, r.status, r.reason, json_array_length(r.cohort) AS devices, coalesce(n.answers, 0) AS answers, "
    "coalesce(n.used, 0) AS used, coalesce(n.reported, 0) AS reported, s.mean AS test_accuracy, "
    "coalesce(g.fired, 0) AS guards, coalesce(t.up, 0) AS bytes_up, coalesce(t.down, 0) AS bytes_down, "
    "r.ended_at - r.started_at AS seconds FROM rounds r LEFT JOIN answers n USING (round) "
    "LEFT JOIN sent t USING (round) LEFT JOIN guards g USING (round) LEFT JOIN scores s USING (round) "
    "WHERE r.run = ?1 ORDER BY r.round"
)
STEP_PROGRESS = (
    "SELECT round, step_number, step, count(*) AS asked, count(*) FILTER (WHERE status = 'answered') AS answered, "
    "count(*) FILTER (WHERE status = 'out') AS out FROM asks "
    "WHERE run = ?1 AND round = (SELECT max(round) FROM rounds WHERE run = ?1) "
    "GROUP BY round, step_number, step ORDER BY step_number"
)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of `ROUND_PROGRESS` with its figures rounded for display."""
    return {
        name: round(value, _DIGITS[name]) if name in _DIGITS and value is not None else value
        for name, value in row.items()
    }
