"""Sums over the answers of a run, so that reads need not add up all answers.

The tables with a row for each device in each round have millions of rows with 1,000 devices in 1,000 rounds. Two kinds
of tables have their sums:

- `round_bytes`, `device_bytes` and `device_figures` contain everything but the open round. The transaction that ends a
  round adds it; whatever comes later is added by the transaction that stores it.
- `round_answers` and `round_figures` contain the rounds that have ended and are settled: no ask is open, and every
  answer is used or reported. A change of such a round deletes its sums; they are computed again when a round ends.

Reads add the sums and what the tables do not contain yet, which is in few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.records import AnswerCounts, Round
from fleetdistill_server.store.states import MAX_STALENESS

__all__ = ["EVERY"]

EVERY = 2**62
"""A round after all rounds."""
_BYTES = ("tensor_bytes", "envelope_bytes", "sent_bytes")
_SUM_OF_BYTES = ", ".join(f"sum({column}) AS {column}" for column in _BYTES)
_OPEN = "SELECT round FROM rounds WHERE run = ?1 AND status = 'open'"
_NOT_SUMMED = (
    "SELECT r.round FROM rounds r WHERE r.run = ?1 AND r.round BETWEEN ?2 AND ?3 "
    "AND NOT EXISTS (SELECT 1 FROM round_answers s WHERE s.run = ?1 AND s.round = r.round)"
)
_FIGURES_OF_ROUND = (
    "avg(sum / count) FILTER (WHERE count > 0) AS mean, count(*) FILTER (WHERE count > 0) AS devices, "
    "count(*) FILTER (WHERE sum > 0) AS positive, count(*) FILTER (WHERE sum <= 0) AS others"
)

BYTES_OF_ROUNDS = (
    f"(SELECT run, round, direction, kind, {', '.join(_BYTES)} FROM round_bytes "
    "WHERE run = ?1 AND round BETWEEN ?2 AND ?3 UNION ALL "
    f"SELECT run, round, direction, kind, {_SUM_OF_BYTES} FROM traffic WHERE run = ?1 AND round IN ({_OPEN} "
    "AND round BETWEEN ?2 AND ?3) GROUP BY run, round, direction, kind) AS bytes_of_rounds"
)
"""Byte counts of run ?1 by round, direction and kind, for the rounds from ?2 to ?3."""

BYTES_OF_DEVICES = (
    f"(SELECT device, direction, {', '.join(_BYTES)} FROM device_bytes WHERE run = ?1 UNION ALL "
    f"SELECT device, direction, {', '.join(_BYTES)} FROM traffic WHERE run = ?1 AND round IN ({_OPEN})) "
    "AS bytes_of_devices"
)
"""Byte counts of run ?1 by device and direction, to be summed."""

ANSWERS_OF_ROUNDS = (
    "(SELECT round, answers, used, reported FROM round_answers WHERE run = ?1 AND round BETWEEN ?2 AND ?3 UNION ALL "
    "SELECT a.round, count(*) AS answers, count(*) FILTER (WHERE u.status = 'used') AS used, "
    "count(*) FILTER (WHERE u.status = 'reported') AS reported FROM asks a JOIN uploads u ON u.ask = a.id "
    f"WHERE a.run = ?1 AND a.round IN ({_NOT_SUMMED}) GROUP BY a.round) AS answers_of_rounds"
)
"""Numbers of answers of run ?1 by round: all, used and reported, for the rounds from ?2 to ?3 with answers."""

FIGURES_OF_ROUNDS = (
    "(SELECT round, name, split, mean, devices, positive, others FROM round_figures "
    "WHERE run = ?1 AND round BETWEEN ?2 AND ?3 UNION ALL "
    f"SELECT round, name, split, {_FIGURES_OF_ROUND} FROM figures WHERE run = ?1 AND round IN ({_NOT_SUMMED}) "
    "GROUP BY round, name, split) AS figures_of_rounds"
)
"""Figures of run ?1 by round, name and split, for the rounds from ?2 to ?3.

Mean over the `devices` that gave a count (NULL if none did), and numbers of devices with a positive and another sum.
"""


def figures_of_devices(condition: str) -> str:
    """Returns a query for the figures of run ?1 by device, name and split: newest round, and numbers as above.

    Args:
        condition: Condition on device, name and split. A device has two rows if it has figures in the open round.
    """
    return (
        f"(SELECT device, name, split, newest, positive, others FROM device_figures WHERE run = ?1 AND {condition} "
        "UNION ALL SELECT device, name, split, max(round) AS newest, count(*) FILTER (WHERE sum > 0) AS positive, "
        f"count(*) FILTER (WHERE sum <= 0) AS others FROM figures WHERE run = ?1 AND round IN ({_OPEN}) "
        f"AND {condition} GROUP BY device, name, split) AS figures_of_devices"
    )


def rounds_with_answers(db: Database, run: str, first: int, last: int) -> list[tuple[Round, AnswerCounts]]:
    """Returns rounds, with the numbers of their answers, ordered by round."""
    rows = db.rows(
        "SELECT r.*, coalesce(n.used, 0) AS used, coalesce(n.reported, 0) AS reported, "
        "coalesce(n.answers, 0) AS answers FROM rounds r "
        f"LEFT JOIN (SELECT * FROM {ANSWERS_OF_ROUNDS}) AS n ON n.round = r.round "
        "WHERE r.run = ?1 AND r.round BETWEEN ?2 AND ?3 ORDER BY r.round",
        *(run, first, last),
    )
    counts = ("used", "reported", "answers")
    return [(Round.from_row(row), AnswerCounts(*(int(row[name]) for name in counts))) for row in rows]


class Sums:
    """Writes the sums. Every method must be called in the transaction that changes what is summed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def contain(self, run: str, number: int) -> bool:
        """Returns whether a round is in the sums, so that later changes must be added: every round but the open one."""
        open_round = "SELECT 1 FROM rounds WHERE run = ? AND round = ? AND status = 'open'"
        return not self._db.exists(open_round, run, number)

    def add_round(self, run: str, number: int) -> None:
        """Adds a round that is open, and then must be ended in the same transaction; does nothing for other rounds."""
        if self.contain(run, number):
            return
        self._db.write(_ADD_ROUND_BYTES, run, number)
        self._db.write(_ADD_DEVICE_BYTES, run, number)
        self._db.write(_add_device_figures(1), run, number)

    def add_bytes(self, rows: Sequence[Row]) -> None:
        """Adds rows of `traffic` of a round that is in the sums."""
        for row in rows:
            counts = {column: row[column] for column in _BYTES}
            name = {column: row[column] for column in ("run", "round", "direction", "kind")}
            self._db.insert("round_bytes", {**name, **counts}, _add_to("round_bytes", "run, round, direction, kind"))
            name = {column: row[column] for column in ("run", "device", "direction")}
            self._db.insert("device_bytes", {**name, **counts}, _add_to("device_bytes", "run, device, direction"))

    def change_figures(self, run: str, number: int, device: str, sign: int) -> None:
        """Takes a device's figures of a round out of the sums (`sign` -1) before a change, adds them (1) after it."""
        self.drop_rounds(run, number, number)
        self._db.write(_add_device_figures(sign, "AND device = ?3"), run, number, device)

    def drop_rounds(self, run: str, first: int, last: int) -> None:
        """Deletes the sums over answers and figures of rounds that change."""
        for table in ("round_answers", "round_figures"):
            self._db.write(f"DELETE FROM {table} WHERE run = ? AND round BETWEEN ? AND ?", run, first, last)

    def add_settled(self, run: str, last: int, first: int | None = None) -> None:
        """Computes the missing sums over answers and figures of settled rounds.

        Args:
            run: Name of the run.
            last: Last round.
            first: First round; None for the first one that can have had an open ask until now.
        """
        settled = self._db.rows(_SETTLED, run, last - MAX_STALENESS if first is None else first, last)
        self._db.insert_many("round_answers", settled)
        for row in settled:
            self._db.write(_ADD_ROUND_FIGURES, run, row["round"])

    def prune(self, run: str, first_kept: int) -> None:
        """Removes figures of the rounds before `first_kept` from the sums, after they were deleted."""
        self._db.write("DELETE FROM round_figures WHERE run = ? AND round < ?", run, first_kept)
        self._db.write("DELETE FROM device_figures WHERE run = ?", run)
        self._db.write(_ADD_KEPT_FIGURES, run)

    def delete(self, run: str) -> None:
        """Deletes the sums of a run."""
        for table in ("round_bytes", "device_bytes", "device_figures", "round_answers", "round_figures"):
            self._db.write(f"DELETE FROM {table} WHERE run = ?", run)


def _add_to(table: str, key: str, columns: Sequence[str] = _BYTES) -> str:
    added = ", ".join(f"{column} = {table}.{column} + excluded.{column}" for column in columns)
    return f"ON CONFLICT ({key}) DO UPDATE SET {added}"


_ADD_ROUND_BYTES, _ADD_DEVICE_BYTES = (
    f"INSERT INTO {table} ({key}, {', '.join(_BYTES)}) SELECT {key}, {_SUM_OF_BYTES} FROM traffic "
    f"WHERE run = ?1 AND round = ?2 GROUP BY {key} {_add_to(table, key)}"
    for table, key in (("round_bytes", "run, round, direction, kind"), ("device_bytes", "run, device, direction"))
)
_ADD_ROUND_FIGURES = (
    "INSERT INTO round_figures (run, round, name, split, mean, devices, positive, others) "
    f"SELECT run, round, name, split, {_FIGURES_OF_ROUND} FROM figures WHERE run = ?1 AND round = ?2 "
    "GROUP BY run, round, name, split"
)
_INTO_DEVICE_FIGURES = "INSERT INTO device_figures (run, device, name, split, newest, positive, others) "
_ADD_KEPT_FIGURES = (
    f"{_INTO_DEVICE_FIGURES} SELECT run, device, name, split, max(round), count(*) FILTER (WHERE sum > 0), "
    f"count(*) FILTER (WHERE sum <= 0) FROM figures WHERE run = ?1 AND round NOT IN ({_OPEN}) "
    "GROUP BY run, device, name, split"
)
_SETTLED = (
    "SELECT r.run, r.round, count(u.receipt) AS answers, count(*) FILTER (WHERE u.status = 'used') AS used, "
    "count(*) FILTER (WHERE u.status = 'reported') AS reported FROM rounds r "
    "LEFT JOIN asks a ON a.run = ?1 AND a.round = r.round LEFT JOIN uploads u ON u.ask = a.id "
    f"WHERE r.run = ?1 AND r.status <> 'open' AND r.round IN ({_NOT_SUMMED}) GROUP BY r.run, r.round "
    "HAVING count(*) FILTER (WHERE a.status = 'open' OR u.status = 'acknowledged') = 0"
)


def _add_device_figures(sign: int, condition: str = "") -> str:
    counts = ", ".join(f"{sign} * CASE WHEN sum {test} 0 THEN 1 ELSE 0 END" for test in (">", "<="))
    newest = "CASE WHEN excluded.newest > device_figures.newest THEN excluded.newest ELSE device_figures.newest END"
    added = _add_to("device_figures", "run, device, name, split", ("positive", "others"))
    return (
        f"{_INTO_DEVICE_FIGURES} SELECT run, device, name, split, round, {counts} FROM figures "
        f"WHERE run = ?1 AND round = ?2 {condition} {added}, newest = {newest}"
    )
