"""Asks and the accepted answers to them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from fleetdistill_server.store.clock import PROCESS
from fleetdistill_server.store.credentials import REVOKED
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.history import History
from fleetdistill_server.store.states import DEADLINE_PASSED
from fleetdistill_server.texts import shortened


class Asks:
    """Rows of `asks` and `uploads`.

    Attributes:
        clock: What deadlines are held against.
    """

    def __init__(self, database: Database, history: History) -> None:
        self.clock = PROCESS
        self._db = database
        self._history = history

    def write(self, rows: Sequence[Row]) -> None:
        """Writes the asks of one step; those that are there are left as they are.

        They are open, but for devices that have gone: nobody waits for these. They are looked up in the transaction
        that writes, so a device that leaves or is revoked meanwhile either is seen here or closes its ask itself.
        """
        with self._db.transaction():
            for row in rows:
                gone = self._db.value(_WHY_GONE, row["run"], row["device"])
                status = {"status": "out" if gone else "open", "reason": gone, "expects": json.dumps(row["expects"])}
                self._db.insert("asks", {**row, **status}, "ON CONFLICT (run, round, step_number, device) DO NOTHING")

    def of_step(self, run: str, number: int, step_number: int) -> list[Row]:
        """The asks of one step in device order, each joined with its answer (columns NULL without one)."""
        return self._db.rows(
            "SELECT a.*, u.sha256, u.samples, u.receipt FROM asks a LEFT JOIN uploads u ON u.ask = a.id "
            "AND u.quarantined_at IS NULL WHERE a.run = ? AND a.round = ? AND a.step_number = ? ORDER BY a.device",
            *(run, number, step_number),
        )

    def get(self, run: str, number: int, step_number: int, device: str) -> Row | None:
        """One ask by its name."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND device = ?",
            *(run, number, step_number, device),
        )

    def next_open(self, run: str, device: str) -> Row | None:
        """The oldest open ask of a device."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND status = 'open' ORDER BY id LIMIT 1", run, device
        )

    def open_ids(self) -> set[int]:
        """Ids of the asks of all runs that still take an answer."""
        return {row["id"] for row in self._db.rows("SELECT id FROM asks WHERE status = 'open'")}

    def devices_with_open(self, run: str) -> set[str]:
        """Devices that have something to do."""
        rows = self._db.rows("SELECT DISTINCT device FROM asks WHERE run = ? AND status = 'open'", run)
        return {row["device"] for row in rows}

    def naming(self, run: str, device: str, sha256: bytes) -> Row | None:
        """The ask of this device that names a payload; of several an open one, then the newest."""
        return self._db.row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND payload = ? ORDER BY status = 'open' DESC, id DESC "
            "LIMIT 1",
            *(run, device, sha256),
        )

    def bound_deadlines(self, run: str, seconds: float) -> None:
        """Gives no open ask more than so many seconds from now: the clock may have been set back meanwhile."""
        latest = self.clock.now() + seconds
        sql = "UPDATE asks SET deadline_at = min(deadline_at, ?) WHERE run = ? AND status = 'open'"
        self._db.write(sql, latest, run)

    def expire(self, run: str, now: float) -> list[Row]:
        """Closes the open asks whose deadline has passed, with an event each; returns them.

        Args:
            run: The run.
            now: Seconds since 1970, of `clock`.
        """
        with self._db.transaction():
            late = self._db.rows("SELECT * FROM asks WHERE run = ? AND status = 'open' AND deadline_at < ?", run, now)
            for ask in late:
                self.close(ask["id"], DEADLINE_PASSED)
                text = f"{ask['device']} did not answer step {ask['step']!r} in time"
                self._history.add_event(run, "late", text, number=ask["round"], device=ask["device"])
        return late

    def end_step(self, run: str, number: int, step_number: int, enough: int, among: Sequence[str]) -> bool:
        """Closes the asks of a step that are still open once it has enough answers; False while it has not.

        Args:
            run: The run.
            number: The round.
            step_number: The step.
            enough: Answers that are enough.
            among: Devices whose answers count.
        """
        with self._db.transaction():
            answered = self._db.value(
                "SELECT count(*) FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered' "
                "AND device IN (SELECT value FROM json_each(?))",
                *(run, number, step_number, json.dumps(list(among))),
            )
            if answered < enough:
                return False
            self._db.write(
                "UPDATE asks SET status = 'out', reason = 'enough devices answered' WHERE run = ? AND round = ? "
                "AND step_number = ? AND status = 'open'",
                *(run, number, step_number),
            )
        return True

    def close(self, ask: int, reason: str) -> None:
        """Puts the device of an open ask out for the round."""
        sql = "UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'"
        self._db.write(sql, shortened(reason), ask)

    def upload_of(self, ask: int) -> Row | None:
        """The accepted answer to an ask; not one whose payload is lost."""
        return self._db.row("SELECT * FROM uploads WHERE ask = ? AND quarantined_at IS NULL", ask)

    def attempts_spent(self, ask: int) -> int:
        """The highest attempt among the accepted answers to an ask whose payloads are lost; 0 for none."""
        return int(
            self._db.value("SELECT max(attempt) FROM uploads WHERE ask = ? AND quarantined_at IS NOT NULL", ask) or 0
        )

    def take_back_upload(self, ask: int, why: str) -> None:
        """Reports the accepted answer to an ask, whose payload is lost, with an event.

        Its device is asked again, under the same deadline, while the round is open; otherwise it is out for the round.
        An answer that is taken back already stays as it is.

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
            self._db.write(
                "UPDATE uploads SET status = 'reported', reason = ?, quarantined_at = ? WHERE receipt = ?",
                *(shortened(f"its payload was lost on the server: {why}"), time.time(), row["receipt"]),
            )
            self._db.write(
                "UPDATE asks SET status = ?, reason = ? WHERE id = ?",
                *("open" if again else "out", None if again else f"its answer was lost on the server, {out}", ask),
            )
            then = "it is asked again" if again else f"it is out for the round: {out}"
            text = f"the answer of {row['device']} to step {row['step']!r} is lost on the server; {then}. {why}"
            self._history.add_event(row["run"], "quarantined", text, number=row["round"], device=row["device"])

    def accept_upload(self, ask: int, attempt: int, sha256: bytes, data_bytes: int, samples: int) -> Row | None:
        """Records an answer, once; the first one wins.

        Returns:
            The row of the accepted answer, an earlier one if there is one; None if the ask takes no answer any more.
        """
        with self._db.transaction():
            known = self.upload_of(ask)
            if known is not None:
                return known
            if not self._db.write("UPDATE asks SET status = 'answered' WHERE id = ? AND status = 'open'", ask):
                return None
            row = {"receipt": secrets.token_hex(16), "ask": ask, "attempt": attempt, "sha256": sha256}
            row |= {"data_bytes": data_bytes, "samples": samples, "received_at": time.time(), "status": "acknowledged"}
            self._db.insert("uploads", row)
        return {**row, "reason": None, "quarantined_at": None}

    def uploads(self, run: str) -> list[Row]:
        """Every accepted answer of a run with its ask."""
        return self._db.rows(
            "SELECT a.round, a.step, a.step_number, a.device, u.* FROM uploads u JOIN asks a ON u.ask = a.id "
            "WHERE a.run = ? ORDER BY u.received_at",
            run,
        )


_WHY_GONE = f"""
SELECT CASE WHEN {REVOKED} THEN 'device revoked' ELSE 'device not present' END
FROM devices WHERE run = ? AND device = ? AND (NOT present OR {REVOKED})
"""

_ANSWERED_ASK = """
SELECT a.*, u.receipt, r.status AS round_status, coalesce(d.present, 1) AS present
FROM asks a
JOIN uploads u ON u.ask = a.id AND u.quarantined_at IS NULL
LEFT JOIN rounds r ON r.run = a.run AND r.round = a.round
LEFT JOIN devices d ON d.run = a.run AND d.device = a.device
WHERE a.id = ?
"""
