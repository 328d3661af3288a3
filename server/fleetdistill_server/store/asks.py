"""Asks, the accepted answers to them, and the count of deletions that an answer's receipt relies on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence

from fleetdistill_server.store.clock import PROCESS
from fleetdistill_server.store.credentials import REVOKED
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.history import History, about_ask
from fleetdistill_server.store.records import ASK_COLUMNS, UPLOAD_COLUMNS, Accepted, Ask, Upload, Work
from fleetdistill_server.store.states import DEADLINE_PASSED, NO_SPACE, AskStatus, UploadStatus
from fleetdistill_server.store.sums import Sums
from fleetdistill_server.texts import shorten

COUNT = "(SELECT count FROM deletions)"
"""The count of deletions, as a part of a statement that reads what belongs to it."""


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

    def add(self, asks: Sequence[Ask]) -> None:
        """Stores new asks of one step; existing asks stay unchanged.

        An ask is stored as open, or as out if its device is absent. Presence is read in the same transaction.
        If a device leaves or is revoked concurrently, the ask is therefore stored as out or closed afterwards.
        """
        now = self._db.now()
        with self._db.transaction():
            for run, number in {(ask.run, ask.round) for ask in asks}:
                self._sums.drop_rounds(run, number, number)
            self._db.write_many(_ADD, [_values(ask, now) for ask in asks])

    def of_step(self, run: str, number: int, step_number: int) -> list[Ask]:
        """Returns the asks of one step, ordered by device."""
        return self._asks(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? ORDER BY device",
            *(run, number, step_number),
        )

    def each_of_step(self, run: str, number: int, step_number: int, most: int) -> Iterator[Ask]:
        """Yields the asks of one step, ordered by device; reads at most `most` at once, and only when they are due."""
        device = ""
        while asks := self._asks(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND device > ? ORDER BY device LIMIT ?",
            *(run, number, step_number, device, most),
        ):
            yield from asks
            device = asks[-1].device

    def devices_of_step(self, run: str, number: int, step_number: int) -> set[str]:
        """Returns the devices with an ask of one step."""
        sql = "SELECT device FROM asks WHERE run = ? AND round = ? AND step_number = ?"
        return set(self._db.column(sql, run, number, step_number))

    def of_run(self, run: str) -> list[Ask]:
        """Returns all asks of a run, oldest first."""
        return self._asks("SELECT * FROM asks WHERE run = ? ORDER BY id", run)

    def get(self, run: str, number: int, step_number: int, device: str) -> Ask | None:
        """Returns one ask by run, round, step number and device, or None."""
        return self._ask(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND device = ?",
            *(run, number, step_number, device),
        )

    def answered_after(self, run: str, number: int, step_number: int, most: int, device: str) -> list[Ask]:
        """Returns the answered asks of one step for devices after `device`, ordered by device, at most `most`."""
        return self._asks(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered' "
            "AND device > ? ORDER BY device LIMIT ?",
            *(run, number, step_number, device, most),
        )

    def unsettled(
        self,
        run: str,
        step: str,
        first: int,
        last: int,
        *,
        status: AskStatus | None = None,
        after: str = "",
        most: int = -1,
    ) -> list[Ask]:
        """Returns the asks of a step that are open, or whose answer is not used yet, ordered by device.

        Args:
            run: Name of the run.
            step: Name of the step.
            first, last: Numbers of the first and the last round.
            status: Only asks of this status; None for both.
            after: Only devices after this one.
            most: Maximum number of asks; -1 for all.
        """
        limit = f" LIMIT {most}" if most >= 0 else ""
        return self._asks(
            f"SELECT a.* {_UNSETTLED} AND (? = '' OR a.status = ?) AND a.device > ? ORDER BY a.device{limit}",
            *(run, first, last, step, status or "", status or "", after),
        )

    def count_unsettled(self, run: str, step: str, first: int, last: int) -> tuple[int, int]:
        """Returns how many asks of `unsettled` are answered, and how many are open."""
        rows = self._db.rows(
            f"SELECT a.status AS status, count(*) AS count {_UNSETTLED} GROUP BY a.status", run, first, last, step
        )
        counts = {row["status"]: int(row["count"]) for row in rows}
        return counts.get(AskStatus.ANSWERED, 0), counts.get(AskStatus.OPEN, 0)

    def first_unsettled(self, run: str, first: int, last: int) -> int | None:
        """Returns the first round with an ask that is open or whose answer is not used yet; None if there is none."""
        value = self._db.value(f"SELECT min(a.round) {_UNSETTLED_OF_ANY_STEP}", run, first, last)
        return None if value is None else int(value)

    def next_open(self, run: str, device: str) -> Ask | None:
        """Returns the oldest open ask of a device, or None."""
        return self._ask(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND status = 'open' ORDER BY id LIMIT 1", run, device
        )

    def work_of(self, run: str, device: str) -> Work | None:
        """Returns what a run has for a device, in one read; None if there is no such run."""
        row = self._db.row(_WORK, run, device)
        return None if row is None else Work.from_row(row)

    def all_open(self, run: str) -> list[Ask]:
        """Returns the open asks of a run, oldest first."""
        return self._asks("SELECT * FROM asks WHERE run = ? AND status = 'open' ORDER BY id", run)

    def open_ids(self) -> set[int]:
        """Returns the ids of the open asks of all runs."""
        return {row["id"] for row in self._db.rows("SELECT id FROM asks WHERE status = 'open'")}

    def devices_with_open(self, run: str, step: str = "") -> set[str]:
        """Returns the devices that have an open ask; if `step` is given, only of that step."""
        rows = self._db.rows(
            "SELECT DISTINCT device FROM asks WHERE run = ? AND status = 'open' AND (? = '' OR step = ?)",
            *(run, step, step),
        )
        return {row["device"] for row in rows}

    def devices_asked(self, run: str, without: str, since: int = 0) -> set[str]:
        """Returns the devices that were asked a step other than `without` in round `since` or later."""
        sql = "SELECT DISTINCT device FROM asks WHERE run = ? AND round >= ? AND step != ?"
        return set(self._db.column(sql, run, since, without))

    def with_payload(self, run: str, device: str, sha256: bytes) -> Ask | None:
        """Returns a device's newest ask that refers to a payload, preferably an open one; None if there is none."""
        return self._ask(
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

    def expire(self, run: str, now: float) -> list[Ask]:
        """Closes the open asks whose deadline has passed, adds an event for each, and returns them.

        The event of an answer that was refused for want of disk space is `no-space`, since its device was not late.

        Args:
            run: Name of the run.
            now: Time of `clock`, in seconds since 1970.
        """
        of_late = "FROM asks WHERE run = ? AND status = 'open' AND deadline_at < ?"
        if not self._db.exists(f"SELECT 1 {of_late} LIMIT 1", run, now):
            return []  # without the write lock
        with self._db.transaction():
            late = self._asks(f"SELECT * {of_late}", run, now)
            for ask in late:
                if ask.reason == NO_SPACE:
                    self.close(ask.id, NO_SPACE)
                    text = f"the answer of {ask.device} to step {ask.step!r} was refused because the disk had no "
                    text += "space, and its deadline has passed; the device drops out of the round"
                    self._history.add_event(run, "no-space", text, **about_ask(ask))
                    continue
                self.close(ask.id, DEADLINE_PASSED)
                text = f"{ask.device} did not answer step {ask.step!r} before its deadline"
                self._history.add_event(run, "late", text, **about_ask(ask))
        return late

    def note_no_space(self, ask: int) -> None:
        """Notes that the answer to an open ask was refused for want of disk space."""
        self._db.write("UPDATE asks SET reason = ? WHERE id = ? AND status = 'open'", NO_SPACE, ask)

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
                "UPDATE asks SET status = 'out', reason = ? WHERE run = ? AND round = ? AND step_number = ? "
                "AND status = 'open'",
                *(_ENOUGH, run, number, step_number),
            )
        return True

    def close(self, ask: int, reason: str) -> None:
        """Closes an open ask with a reason; its device drops out of the round."""
        sql = "UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'"
        self._db.write(sql, shorten(reason), ask)

    def reasons_out(self, run: str, number: int) -> dict[str, int]:
        """Returns why devices are out of a round, each with the number of devices, the most frequent reason first."""
        rows = self._db.rows(
            "SELECT reason, count(DISTINCT device) AS devices FROM asks WHERE run = ? AND round = ? AND "
            "status = 'out' AND reason != ? GROUP BY reason ORDER BY devices DESC, reason",
            *(run, number, _ENOUGH),
        )
        return {row["reason"]: row["devices"] for row in rows}

    def close_step(self, run: str, step: str, devices: Collection[str], reason: str) -> list[tuple[int, str, bytes]]:
        """Closes the open asks of a step for some devices with a reason.

        Returns:
            Round, device and payload of each closed ask; the payload is empty if the ask has none.
        """
        among = set(devices)
        sql = "SELECT id, round, device, payload FROM asks WHERE run = ? AND step = ? AND status = 'open'"
        close = "UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'"
        with self._db.transaction():
            rows = [row for row in self._db.rows(sql, run, step) if row["device"] in among]
            self._db.write_many(close, ((shorten(reason), row["id"]) for row in rows))
        return [(row["round"], row["device"], row["payload"] or b"") for row in rows]

    def upload_of(self, ask: int) -> Upload | None:
        """Returns the accepted answer to an ask, or None if there is none or its payload is missing or damaged."""
        row = self._db.row(f"{_UPLOADS} WHERE u.ask = ? AND u.quarantined_at IS NULL", ask)
        return None if row is None else Upload.from_row(row)

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
            asked = Ask.from_row(row)
            late = asked.deadline_at < self.clock.now()
            out = DEADLINE_PASSED if late else "device not present" if not row["present"] else "round closed"
            again = row["round_status"] == "open" and not late and row["present"]
            self._sums.drop_rounds(asked.run, asked.round, asked.round)
            self._db.write(
                "UPDATE uploads SET status = 'reported', reason = ?, quarantined_at = ? WHERE receipt = ?",
                *(shorten(f"the payload was lost on the server: {why}"), self._db.now(), row["receipt"]),
            )
            self._db.write(
                "UPDATE asks SET status = ?, reason = ? WHERE id = ?",
                *("open" if again else "out", None if again else f"the answer was lost on the server, {out}", ask),
            )
            then = "the device is asked again" if again else f"the device drops out of the round: {out}"
            text = f"the answer of {asked.device} to step {asked.step!r} was lost on the server; {then}. {why}"
            self._history.add_event(asked.run, "quarantined", text, **about_ask(asked))

    def count_deletions(self, ask: int) -> int | None:
        """Returns the count of deletions, to be read before an answer's payload is stored.

        None if the ask is out of its round, or no longer exists, so that it takes no answer.
        """
        value = self._db.value(f"SELECT {COUNT} FROM asks WHERE id = ? AND status != 'out'", ask)
        return None if value is None else int(value)

    def accept_upload(self, ask: int, attempt: int, sha256: bytes, data_bytes: int, samples: int) -> Accepted | None:
        """Stores an answer. Only the first answer to an ask is accepted.

        Returns:
            The accepted answer, which can be an earlier one; None if the ask no longer takes an answer.
        """
        with self._db.together():
            asked = self._db.row(_TAKE_ANSWER, ask)
            if asked is None:
                known = self.upload_of(ask)
                return None if known is None else Accepted(known, is_new=False)
            deletions = asked.pop("deletions")
            row: Row = {"receipt": secrets.token_hex(16), "ask": ask, "attempt": attempt, "sha256": sha256}
            row |= {
                "data_bytes": data_bytes,
                "samples": samples,
                "received_at": self._db.now(),
                "status": UploadStatus.ACKNOWLEDGED,
            }
            self._db.insert("uploads", row)
        return Accepted(Upload(**asked, **row, reason="", quarantined_at=None), True, deletions)

    def record_times(self, times: Mapping[tuple[int, str], float]) -> None:
        """Stores when the steps of asks began: seconds since 1970 by (ask, column); the first time of each stays."""
        with self._db.transaction():
            for (ask, column), at in times.items():
                self._db.write(f"UPDATE asks SET {column} = ? WHERE id = ? AND {column} IS NULL", at, ask)

    def uploads(self, run: str) -> list[Upload]:
        """Returns all accepted answers of a run, oldest first."""
        return [
            Upload.from_row(row) for row in self._db.rows(f"{_UPLOADS} WHERE a.run = ? ORDER BY u.received_at", run)
        ]

    def _ask(self, sql: str, *values: object) -> Ask | None:
        row = self._db.row(sql, *values)
        return None if row is None else Ask.from_row(row)

    def _asks(self, sql: str, *values: object) -> list[Ask]:
        return [Ask.from_row(row) for row in self._db.rows(sql, *values)]


_ENOUGH = "enough devices answered"
"""Reason stored for an ask that was still open when its step ended."""
_TAKE_ANSWER = (
    "UPDATE asks SET status = 'answered', reason = NULL WHERE id = ? AND status = 'open' "
    f"RETURNING round, step, step_number, device, {COUNT} AS deletions"
)
_WORK = """
SELECT a.*, r.status AS run_status, r.reason AS run_reason, r.completed_rounds,
    (SELECT max(attempt) FROM uploads WHERE ask = a.id AND quarantined_at IS NOT NULL) AS lost_attempt
FROM runs r
LEFT JOIN asks a ON a.id = (SELECT min(id) FROM asks WHERE run = ?1 AND device = ?2 AND status = 'open')
WHERE r.name = ?1
"""
_UPLOADS = f"SELECT {ASK_COLUMNS}, {UPLOAD_COLUMNS} FROM uploads u JOIN asks a ON u.ask = a.id"
_WHY_ABSENT = (
    f"(SELECT CASE WHEN {REVOKED} THEN 'device revoked' ELSE 'device not present' END "
    f"FROM devices WHERE run = ?1 AND device = ?4 AND (present = 0 OR {REVOKED}))"
)
_ADD = (
    "INSERT INTO asks (run, round, step_number, device, step, expects, payload, payload_bytes, seed, deadline_at, "
    "asked_at, status, reason) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, "
    f"CASE WHEN {_WHY_ABSENT} IS NULL THEN 'open' ELSE 'out' END, {_WHY_ABSENT}) "
    "ON CONFLICT (run, round, step_number, device) DO NOTHING"
)


def _values(ask: Ask, now: float) -> tuple[object, ...]:
    """Returns the values of `_ADD`."""
    return (
        *(ask.run, ask.round, ask.step_number, ask.device, ask.step, json.dumps(dict(ask.expects))),
        *(ask.payload or None, ask.payload_bytes, ask.seed, ask.deadline_at, now),
    )


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


# --- Counts deletions of payloads, so that a receipt need not look for its payload under the write lock.
#
# The count is odd while a deletion is announced and even otherwise. A deletion is announced in a transaction that is
# committed before the first file is deleted. The transaction that deletes files makes the count even again. A process
# that crashes while it deletes therefore leaves an odd count, even though its transaction is rolled back.
#
# A payload that was stored after an even count was read exists as long as the count is unchanged.


def is_unchanged(before: int, now: int) -> bool:
    """Returns whether nothing was deleted between two counts; False also if a deletion was announced at the first.

    `before` was read before a payload was stored, `now` in the transaction that refers to the payload.
    """
    return before % 2 == 0 and now == before


class Deletions:
    """Reads and writes the table `deletions`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def announce(self) -> None:
        """Announces a deletion. The announcement must be committed before the deletion begins."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 0")

    def announced(self) -> bool:
        """Returns whether a deletion is announced."""
        return int(self._db.value(f"SELECT {COUNT}")) % 2 == 1

    def end(self) -> None:
        """Ends an announced deletion, if any. Call this in the transaction that deletes files, or instead of it."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 1")
