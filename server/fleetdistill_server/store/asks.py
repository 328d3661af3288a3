"""Asks and the accepted answers to them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from fleetdistill_server.store.clock import PROCESS
from fleetdistill_server.store.credentials import REVOKED
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.history import History, about_ask
from fleetdistill_server.store.states import DEADLINE_PASSED
from fleetdistill_server.store.sums import Sums
from fleetdistill_server.texts import shortened


class Asks:
    """Reads and writes the tables `asks` and `uploads`.

    Attributes:
        clock: Clock that deadlines are compared with.
    """

    def __init__(self, database: Database, history: History) -> None:
        self.clock = PROCESS
        self._db = database
        self._history = history
        self._sums = Sums(database)

    def write(self, rows: Sequence[Row]) -> None:
        """Inserts the asks of one step; existing asks stay unchanged.

        An ask is inserted as `open`, or as `out` if its device is absent. Presence is read in the same transaction.
        If a device leaves or is revoked concurrently, the ask is therefore inserted as `out` or closed afterwards.
        """
        now = self._db.now()
        with self._db.transaction():
            for run, number in {(row["run"], row["round"]) for row in rows}:
                self._sums.drop_rounds(run, number, number)
            for row in rows:
                gone = self._db.value(_WHY_ABSENT, row["run"], row["device"])
                status = {"status": "out" if gone else "open", "reason": gone, "expects": json.dumps(row["expects"])}
                self._db.insert(
                    "asks",
                    {**row, **status, "asked_at": now},
                    "ON CONFLICT (run, round, step_number, device) DO NOTHING",
                )

    def of_step(self, run: str, number: int, step_number: int) -> list[Row]:
        """Returns the asks of one step ordered by device, each joined with its answer (NULL if there is none)."""
        return self._db.rows(
            "SELECT a.*, u.sha256, u.samples, u.receipt FROM asks a LEFT JOIN uploads u ON u.ask = a.id "
            "AND u.quarantined_at IS NULL WHERE a.run = ? AND a.round = ? AND a.step_number = ? ORDER BY a.device",
            *(run, number, step_number),
        )

    def get(self, run: str, number: int, step_number: int, device: str) -> Row | None:
        """Returns one ask by run, round, step number and device, or None."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND device = ?",
            *(run, number, step_number, device),
        )

    def answered_after(self, run: str, number: int, step_number: int, most: int, device: str) -> list[Row]:
        """Returns the answered asks of one step for devices after `device`, ordered by device, at most `most`."""
        return self._db.rows(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered' "
            "AND device > ? ORDER BY device LIMIT ?",
            *(run, number, step_number, device, most),
        )

    def unsettled(
        self, run: str, step: str, first: int, last: int, *, status: str = "", after: str = "", most: int = -1
    ) -> list[Row]:
        """Returns the asks of a step that are open, or whose answer is not used yet, ordered by device.

        Args:
            run: Name of the run.
            step: Name of the step.
            first, last: Numbers of the first and the last round.
            status: `open` or `answered` for asks of this status only.
            after: Only devices after this one.
            most: Maximum number of asks; -1 for all.
        """
        limit = f" LIMIT {most}" if most >= 0 else ""
        return self._db.rows(
            f"SELECT a.* {_UNSETTLED} AND (? = '' OR a.status = ?) AND a.device > ? ORDER BY a.device{limit}",
            *(run, first, last, step, status, status, after),
        )

    def count_unsettled(self, run: str, step: str, first: int, last: int) -> tuple[int, int]:
        """Returns how many asks of `unsettled` are answered, and how many are open."""
        rows = self._db.rows(
            f"SELECT a.status AS status, count(*) AS count {_UNSETTLED} GROUP BY a.status", run, first, last, step
        )
        counts = {row["status"]: int(row["count"]) for row in rows}
        return counts.get("answered", 0), counts.get("open", 0)

    def first_unsettled(self, run: str, first: int, last: int) -> int | None:
        """Returns the first round with an ask that is open or whose answer is not used yet; None if there is none."""
        found = self._db.value(f"SELECT min(a.round) {_UNSETTLED_OF_ANY_STEP}", run, first, last)
        return None if found is None else int(found)

    def next_open(self, run: str, device: str) -> Row | None:
        """Returns the oldest open ask of a device, or None."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND status = 'open' ORDER BY id LIMIT 1", run, device
        )

    def all_open(self, run: str) -> list[Row]:
        """Returns device, round, step and deadline of the open asks of a run, oldest first."""
        columns = "device, round, step_number, step, deadline_at"
        return self._db.rows(f"SELECT {columns} FROM asks WHERE run = ? AND status = 'open' ORDER BY id", run)

    def open_ids(self) -> set[int]:
        """Returns the ids of the open asks of all runs."""
        return {row["id"] for row in self._db.rows("SELECT id FROM asks WHERE status = 'open'")}

    def devices_with_open(self, run: str) -> set[str]:
        """Returns the devices that have an open ask."""
        rows = self._db.rows("SELECT DISTINCT device FROM asks WHERE run = ? AND status = 'open'", run)
        return {row["device"] for row in rows}

    def naming(self, run: str, device: str, sha256: bytes) -> Row | None:
        """Returns a device's newest ask that refers to a payload, preferably an open one; None if there is none."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND payload = ? ORDER BY status = 'open' DESC, id DESC "
            "LIMIT 1",
            *(run, device, sha256),
        )

    def bound_deadlines(self, run: str, seconds: float) -> None:
        """Limits the deadlines of open asks to `seconds` from now.

        Without the limit, setting the system clock back during a restart would extend them.
        """
        latest = self.clock.now() + seconds
        sql = "UPDATE asks SET deadline_at = ? WHERE run = ? AND status = 'open' AND deadline_at > ?"
        self._db.write(sql, latest, run, latest)

    def expire(self, run: str, now: float) -> list[Row]:
        """Closes the open asks whose deadline has passed, adds an event for each, and returns them.

        Args:
            run: Name of the run.
            now: Time of `clock`, in seconds since 1970.
        """
        with self._db.transaction():
            late = self._db.rows("SELECT * FROM asks WHERE run = ? AND status = 'open' AND deadline_at < ?", run, now)
            for ask in late:
                self.close(ask["id"], DEADLINE_PASSED)
                text = f"{ask['device']} did not answer step {ask['step']!r} before its deadline"
                self._history.add_event(run, "late", text, **about_ask(ask))
        return late

    def end_step(self, run: str, number: int, step_number: int, enough: int, among: Sequence[str]) -> bool:
        """Closes the open asks of a step once it has enough answers; returns False until then.

        Args:
            run: Name of the run.
            number: Round number.
            step_number: Number of the step in the round.
            enough: Number of answers that ends the step.
            among: Devices whose answers count.
        """
        with self._db.transaction():
            answered = self._db.rows(
                "SELECT device FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered'",
                *(run, number, step_number),
            )
            if len({row["device"] for row in answered}.intersection(among)) < enough:
                return False
            self._db.write(
                "UPDATE asks SET status = 'out', reason = 'enough devices answered' WHERE run = ? AND round = ? "
                "AND step_number = ? AND status = 'open'",
                *(run, number, step_number),
            )
        return True

    def close(self, ask: int, reason: str) -> None:
        """Closes an open ask with a reason; its device drops out of the round."""
        sql = "UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'"
        self._db.write(sql, shortened(reason), ask)

    def upload_of(self, ask: int) -> Row | None:
        """Returns the accepted answer to an ask, or None if there is none or its payload is missing or damaged."""
        return self._db.row("SELECT * FROM uploads WHERE ask = ? AND quarantined_at IS NULL", ask)

    def last_lost_attempt(self, ask: int) -> int:
        """Returns the highest attempt number among an ask's answers with a missing or damaged payload; 0 if none."""
        return int(
            self._db.value("SELECT max(attempt) FROM uploads WHERE ask = ? AND quarantined_at IS NOT NULL", ask) or 0
        )

    def withdraw_upload(self, ask: int, why: str) -> None:
        """Withdraws the accepted answer to an ask because its payload is missing or damaged, and adds an event.

        If the round is open, the device present and the deadline ahead, the device is asked again with the same
        deadline. Otherwise the device drops out of the round.
        An answer that was already withdrawn is left unchanged.

        Args:
            ask: Id of the ask.
            why: What is wrong with the payload.
        """
        with self._db.transaction():
            row = self._db.row(_ANSWERED_ASK, ask)
            if row is None:
                return
            late = row["deadline_at"] < self.clock.now()
            out = "deadline passed" if late else "device not present" if not row["present"] else "round closed"
            again = row["round_status"] == "open" and not late and row["present"]
            self._sums.drop_rounds(row["run"], row["round"], row["round"])
            self._db.write(
                "UPDATE uploads SET status = 'reported', reason = ?, quarantined_at = ? WHERE receipt = ?",
                *(shortened(f"the payload was lost on the server: {why}"), self._db.now(), row["receipt"]),
            )
            self._db.write(
                "UPDATE asks SET status = ?, reason = ? WHERE id = ?",
                *("open" if again else "out", None if again else f"the answer was lost on the server, {out}", ask),
            )
            then = "the device is asked again" if again else f"the device drops out of the round: {out}"
            text = f"the answer of {row['device']} to step {row['step']!r} was lost on the server; {then}. {why}"
            self._history.add_event(row["run"], "quarantined", text, **about_ask(row))

    def accept_upload(self, ask: int, attempt: int, sha256: bytes, data_bytes: int, samples: int) -> Row | None:
        """Stores an answer. Only the first answer to an ask is accepted.

        Returns:
            The row of the accepted answer, which can be an earlier one; None if the ask no longer takes an answer.
        """
        with self._db.transaction():
            known = self.upload_of(ask)
            if known is not None:
                return known
            if not self._db.write("UPDATE asks SET status = 'answered' WHERE id = ? AND status = 'open'", ask):
                return None
            row = {"receipt": secrets.token_hex(16), "ask": ask, "attempt": attempt, "sha256": sha256}
            row |= {
                "data_bytes": data_bytes,
                "samples": samples,
                "received_at": self._db.now(),
                "status": "acknowledged",
            }
            self._db.insert("uploads", row)
        return {**row, "reason": None, "quarantined_at": None}

    def record_times(self, times: Mapping[tuple[int, str], float]) -> None:
        """Stores when the steps of asks began: seconds since 1970 by (ask, column); the first time of each stays."""
        with self._db.transaction():
            for (ask, column), at in times.items():
                self._db.write(f"UPDATE asks SET {column} = ? WHERE id = ? AND {column} IS NULL", at, ask)

    def uploads(self, run: str) -> list[Row]:
        """Returns all accepted answers of a run with their asks, oldest first."""
        return self._db.rows(
            "SELECT a.round, a.step, a.step_number, a.device, u.* FROM uploads u JOIN asks a ON u.ask = a.id "
            "WHERE a.run = ? ORDER BY u.received_at",
            run,
        )


_WHY_ABSENT = f"""
SELECT CASE WHEN {REVOKED} THEN 'device revoked' ELSE 'device not present' END
FROM devices WHERE run = ? AND device = ? AND (present = 0 OR {REVOKED})
"""

_UNSETTLED_OF_ANY_STEP = (
    "FROM asks a LEFT JOIN uploads u ON u.ask = a.id AND u.quarantined_at IS NULL AND u.status = 'acknowledged' "
    "WHERE a.run = ? AND a.round >= ? AND a.round <= ? "
    "AND (a.status = 'open' OR a.status = 'answered' AND u.ask IS NOT NULL)"
)
_UNSETTLED = f"{_UNSETTLED_OF_ANY_STEP} AND a.step = ?"

_ANSWERED_ASK = """
SELECT a.*, u.receipt, r.status AS round_status, coalesce(d.present, 1) AS present
FROM asks a
JOIN uploads u ON u.ask = a.id AND u.quarantined_at IS NULL
LEFT JOIN rounds r ON r.run = a.run AND r.round = a.round
LEFT JOIN devices d ON d.run = a.run AND d.device = a.device
WHERE a.id = ?
"""
