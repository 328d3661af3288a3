"""Figures of rounds and runs: the one reading for the command line, dashboard, metrics, trackers and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetdistill_server.event_kinds import SECURE_SUM, SECURE_SUM_FAILED
from fleetdistill_server.figures import SECURE_SUMS, SumFigures, sums_of
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.records import AnswerCounts, Round, read_declared
from fleetdistill_server.store.states import OVER, RunStatus, sql_list
from fleetdistill_server.store.summaries import Summaries
from fleetdistill_server.store.sums import EVERY, rounds_with_answers

__all__ = ["Reported", "RoundFigures", "RunFigures", "round_figures", "run_counts", "run_figures"]


class Reported(NamedTuple):
    """Mean over the devices of what they reported, and the number of devices."""

    mean: float
    devices: int


@dataclass(frozen=True)
class RoundFigures:
    """Figures of a round.

    Attributes:
        round: The round.
        answers: Numbers of its answers.
        guards: How often guards of the method fired.
        reported: What devices reported, by name (accuracy, loss) and split, such as train.
        kept, replaced: Number of devices whose app kept or replaced its model; None without validation data.
        bytes_up, bytes_down: Bytes from and to devices on the link.
        global_accuracy: Accuracy of the global model on `[evaluation] data`, in [0, 1]; None without either.
        method: The figures that the method declares, by name; None for those that it did not report.
    """

    round: Round
    answers: AnswerCounts
    guards: int
    reported: Mapping[tuple[str, str], Reported]
    kept: int | None
    replaced: int | None
    bytes_up: int
    bytes_down: int
    global_accuracy: float | None
    method: Mapping[str, float | str | None]

    @property
    def train_loss(self) -> float | None:
        """Mean over the devices of the loss on their training data; None if no device reported it."""
        return self._mean("loss", "train")

    @property
    def test_accuracy(self) -> float | None:
        """Mean over the devices of the accuracy on their test data, in [0, 1]; None if no device reported it."""
        return self._mean("accuracy", "test")

    def _mean(self, name: str, split: str) -> float | None:
        figure = self.reported.get((name, split))
        return None if figure is None else figure.mean


def round_figures(db: Database, run: str, first: int = 0, last: int = EVERY) -> list[RoundFigures]:
    """Returns the figures of the rounds from `first` to `last`, both included, ordered by round."""
    summaries = Summaries(db)
    # Before their figures: a round that ends between two reads would lack some, and might not be read again.
    rounds = rounds_with_answers(db, run, first, last)
    declared = read_declared(db.value("SELECT figures FROM runs WHERE name = ?", run))
    guards = summaries.guards(run, first, last)
    replacements = summaries.replacements(run, first, last)
    sent = {row["round"]: row for row in summaries.bytes(run, ("round",), first, last)}
    reported: dict[int, dict[tuple[str, str], Reported]] = {}
    for row in summaries.mean_figures(run, first, last):
        by_name = reported.setdefault(row["round"], {})
        by_name[row["name"], row["split"]] = Reported(row["mean"], row["devices"])
    result = []
    for shown, answers in rounds:
        number = shown.number
        models, link = replacements.get(number), sent.get(number, {})
        result.append(
            RoundFigures(
                round=shown,
                answers=answers,
                guards=guards.get(number, 0),
                reported=reported.get(number, {}),
                kept=None if models is None else models.kept,
                replaced=None if models is None else models.replaced,
                bytes_up=link.get("up_sent", 0),
                bytes_down=link.get("down_sent", 0),
                global_accuracy=shown.figures.get("global_accuracy"),
                method={name: figure.value(shown.figures.get(name)) for name, figure in declared.items()},
            )
        )
    return result


@dataclass(frozen=True)
class RunFigures:
    """The present figures of a run.

    Attributes:
        name, status, config, completed_rounds: As in the table `runs`.
        present: Number of devices that are checked in.
        asks: Number of asks by state: all that are open, and those of the newest round that are answered or out.
        short_rounds: Number of consecutive short rounds up to now.
        unfinished_since: When the first round since the last completed one began, in seconds since 1970; None if none
            has.
        last: Figures of the last completed round; None before it.
        sums: Numbers of secure sums in its events, by kind of event; empty without any.
        last_sum: The newest secure sum of a round that has ended; None before it.
    """

    name: str
    status: RunStatus
    config: dict[str, Any]
    completed_rounds: int
    present: int
    asks: dict[str, int]
    short_rounds: int
    unfinished_since: float | None
    last: RoundFigures | None
    sums: Mapping[str, int]
    last_sum: SumFigures | None


def run_figures(db: Database, most: int) -> list[RunFigures]:
    """Returns the figures of at most `most` runs: the newest of those that have not ended, then of the others.

    The cost does not grow with the number of rounds.
    """
    rows = db.rows(
        "SELECT name, status, config, completed_rounds, next_round FROM runs "
        f"ORDER BY CASE WHEN status IN ({sql_list(OVER)}) THEN 1 ELSE 0 END, created_at DESC, name LIMIT ?",
        most,
    )
    return [_figures_of(db, row) for row in rows]


def _figures_of(db: Database, row: Row) -> RunFigures:
    name = row["name"]
    last = int(db.value("SELECT max(round) FROM rounds WHERE run = ? AND status = 'closed'", name) or 0)
    later = db.row(
        "SELECT min(started_at) AS begun, count(*) FILTER (WHERE status = 'short') AS short FROM rounds "
        "WHERE run = ? AND round > ? AND status IN ('open', 'short')",
        *(name, last),
    )
    sums = {
        kind: int(db.value("SELECT count(*) FROM events WHERE run = ? AND kind = ?", name, kind))
        for kind in (SECURE_SUM, SECURE_SUM_FAILED)
    }
    sums = sums if any(sums.values()) else {}
    return RunFigures(
        name=name,
        status=RunStatus(row["status"]),
        config=json.loads(row["config"]),
        completed_rounds=row["completed_rounds"],
        present=int(db.value("SELECT count(*) FROM devices WHERE run = ? AND present = 1", name)),
        asks=_asks(db, name, row["next_round"] - 1),
        short_rounds=later["short"] if later else 0,
        unfinished_since=later["begun"] if later else None,
        last=next(iter(round_figures(db, name, last, last)), None) if last else None,
        sums=sums,
        last_sum=_last_sum(db, name) if sums else None,
    )


def _last_sum(db: Database, run: str) -> SumFigures | None:
    """Returns the newest secure sum of a run that has events of some."""
    figures = db.value(
        "SELECT r.figures FROM events e JOIN rounds r ON r.run = e.run AND r.round = e.round "
        "WHERE e.run = ? AND e.kind IN (?, ?) AND r.figures LIKE ? ORDER BY e.id DESC LIMIT 1",
        *(run, SECURE_SUM, SECURE_SUM_FAILED, f'%"{SECURE_SUMS}"%'),
    )
    sums = sums_of(json.loads(figures or "{}"))
    return sums[max(sums)] if sums else None


def _asks(db: Database, run: str, newest: int) -> dict[str, int]:
    count = "SELECT count(*) FROM asks WHERE run = ? AND"
    return {
        "open": int(db.value(f"{count} status = 'open'", run)),
        "answered": int(db.value(f"{count} round = ? AND status = 'answered'", run, newest)),
        "out": int(db.value(f"{count} round = ? AND status = 'out'", run, newest)),
    }


def run_counts(db: Database) -> dict[str, int]:
    """Returns the number of runs by status."""
    rows = db.rows("SELECT status, count(*) AS runs FROM runs GROUP BY status")
    return {row["status"]: row["runs"] for row in rows}
