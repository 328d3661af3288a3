"""The only truth of a server: runs, devices, rounds, asks, uploads, events and figures in SQLite, payloads beside them.

Tables (`schema.py`): `runs` one row a run with its contract, progress and checkpoint; `devices` who checked in;
`rounds` with their cohorts; `asks` one row for each (run, round, step number, device); `uploads` the accepted answers,
at most one an ask, whose row *is* the receipt; `events` everything refused, late, guarded or out of the ordinary;
`figures` sums and counts that devices report; `traffic` bytes. Payloads and checkpoints are blobs (`blobs.py`).

The database runs in WAL mode with `synchronous=FULL`, both asserted when it is opened: a commit is on the disk when it
returns. Every public method is one transaction; `with store.transaction():` joins several. A store may be used from
several threads (one lock) and several processes (one `Store` each). `Store.in_memory()` is the same class on
`:memory:`, with blobs in a dictionary.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlite_utils

from fleetdistill.errors import NoSpaceError, RunError, StoreError
from fleetdistill.knowledge import Metrics
from fleetdistill.state.durable import make_directory
from fleetdistill_server.config.run_changes import changes_between, refusal
from fleetdistill_server.logs import log_event
from fleetdistill_server.store.back_off import rounds_left_out
from fleetdistill_server.store.blobs import Blobs, FileBlobs, MemoryBlobs, disk_errors
from fleetdistill_server.store.checks import check_database, check_whole, in_our_words
from fleetdistill_server.store.clock import PROCESS
from fleetdistill_server.store.progress import ROUND_PROGRESS, RUN_PROGRESS, STEP_PROGRESS, Progress
from fleetdistill_server.store.schema import migrations
from fleetdistill_server.store.traffic import ENVELOPE, REFUSED, Counted
from fleetdistill_server.texts import shortened

Row = dict[str, Any]
_BUSY_SECONDS = 30
OVER = ("finished", "cancelled")
"""States of a run that is over, for its devices and for good, unless a finished one is given more rounds."""
AT_REST = (*OVER, "stopped")
"""States of a run that no engine works on; a stopped one goes on with the next start."""
DEADLINE_PASSED = "deadline passed"
"""Reason of an ask that nobody answered in time."""


class Store:
    """Runs, rounds, asks, answers and what happened. See the module's docstring.

    Attributes:
        blobs: Payloads and checkpoints.
        clock: What deadlines are held against.
    """

    def __init__(self, connection: sqlite3.Connection, blobs: Blobs, journal_mode: str) -> None:
        self.blobs = blobs
        self.clock = PROCESS
        self._lock = threading.RLock()
        self._db = sqlite_utils.Database(connection)
        self._to_log: list[Row] = []  # events of the open transaction
        try:
            with _database_errors():
                self._assert_durable(journal_mode)
            with self.transaction():  # of several processes that open a new store, one makes the tables
                check_whole(self._db, blobs)
                migrations.apply(self._db)
        except StoreError:
            connection.close()
            raise

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Opens the store in a directory, makes it if need be, and brings its tables up to date.

        Raises:
            StoreError: The directory cannot be used; the database is damaged, lost, or of a later version.
        """
        with disk_errors(f"opening the store {directory}"):
            make_directory(directory)
        with _database_errors():
            connection = sqlite3.connect(
                directory / "store.sqlite", timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            _use_wal(connection)
        return cls(connection, FileBlobs(directory / "blobs"), "wal")

    @classmethod
    def in_memory(cls) -> Store:
        """A store that lives as long as the object, for simulation in one process."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        return cls(connection, MemoryBlobs(), "memory")

    def _assert_durable(self, journal_mode: str) -> None:
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA fullfsync=ON")  # macOS flushes its drive cache only with this
        found = (self._value("PRAGMA journal_mode"), self._value("PRAGMA synchronous"))
        if found != (journal_mode, 2):
            raise StoreError(f"the database runs with journal mode and synchronous {found}, must be {journal_mode}, 2")

    def check(self) -> None:
        """Reads the whole database. Raises StoreError if it is damaged."""
        with self._lock, _database_errors():
            check_database(self._db)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Joins several calls into one transaction; a nested one is a savepoint of its own.

        Raises:
            StoreError: The database could not be written, for instance because the disk is full.
        """
        with self._lock, _database_errors():
            before = len(self._to_log)
            try:
                if self._db.conn.in_transaction:
                    with self._db.atomic():
                        yield
                    return
                self._db.conn.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.conn.execute("COMMIT")
                except BaseException:
                    self._db.rollback()
                    raise
            except BaseException:
                del self._to_log[before:]
                raise
            committed, self._to_log = self._to_log, []
        for row in committed:
            log_event(row)

    def _rows(self, sql: str, *values: Any) -> list[Row]:
        with self._lock, _database_errors():
            return list(self._db.query(sql, values))

    def _row(self, sql: str, *values: Any) -> Row | None:
        rows = self._rows(sql, *values)
        return rows[0] if rows else None

    def _value(self, sql: str, *values: Any) -> Any:
        row = self._row(sql, *values)
        return next(iter(row.values())) if row else None

    def _write(self, sql: str, *values: Any) -> int:
        with self.transaction():
            return self._db.conn.execute(sql, values).rowcount

    def _insert(self, table: str, row: Mapping[str, Any], conflict: str = "") -> int | None:
        names = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        with self.transaction():
            sql = f"INSERT INTO {table} ({names}) VALUES ({marks}) {conflict}"
            return self._db.conn.execute(sql, tuple(row.values())).lastrowid

    # --- runs

    def begin_run(self, name: str, config: Mapping[str, Any]) -> None:
        """Registers a run, or finds it again; `registration.py` has what may change between two starts.

        Raises:
            RunError: The run exists with another configuration; the message says what changed.
        """
        with self.transaction():
            known = self.run(name)
            if known is not None:
                changes = changes_between(json.loads(known["config"]), json.loads(json.dumps(config)))
                if changes:
                    raise RunError(refusal(name, changes))
                return
            row = {"name": name, "config": json.dumps(config), "status": "preparing", "created_at": time.time()}
            self._insert("runs", {**row, "completed_rounds": 0, "next_round": 1})

    def change_run(self, name: str, config: Mapping[str, Any], contract: bytes | None) -> None:
        """Sets a run's settings, and its contract in which some of them stand."""
        self._write("UPDATE runs SET config = ?, contract = ? WHERE name = ?", json.dumps(config), contract, name)

    def run(self, name: str) -> Row | None:
        """The run's row."""
        return self._row("SELECT * FROM runs WHERE name = ?", name)

    def runs(self) -> list[Row]:
        """All runs, oldest first, with the number of devices seen and of uploads."""
        return self._rows(
            "SELECT name, status, reason, completed_rounds, config, created_at, "
            "(SELECT count(*) FROM devices WHERE run = name) AS devices, "
            "(SELECT count(*) FROM uploads u JOIN asks a ON u.ask = a.id WHERE a.run = name) AS uploads "
            "FROM runs ORDER BY created_at, name"
        )

    def run_names(self) -> list[str]:
        """Names of all runs, oldest first."""
        return [row["name"] for row in self._rows("SELECT name FROM runs ORDER BY created_at, name")]

    def own_run(self, name: str) -> str:
        """Makes the caller the run's only engine; returns the token that its later writes must carry.

        Raises:
            RunError: The run was cancelled.
        """
        token = secrets.token_hex(8)
        if not self._write("UPDATE runs SET engine = ? WHERE name = ? AND status != 'cancelled'", token, name):
            raise RunError(f"run {name!r} was cancelled")
        return token

    def assert_owner(self, name: str, token: str) -> None:
        """Raises RunError if another engine has taken the run over since `own_run`, or it was cancelled."""
        if self._value("SELECT engine FROM runs WHERE name = ?", name) != token:
            self.assert_not_cancelled(name)
            raise RunError(f"run {name!r} was taken over by another engine")

    def assert_not_cancelled(self, name: str) -> None:
        """Raises RunError if the run was cancelled: devices may not be asked any more."""
        if self._value("SELECT status FROM runs WHERE name = ?", name) == "cancelled":
            raise RunError(f"run {name!r} was cancelled")

    def publish_contract(self, name: str, contract: bytes) -> None:
        """Opens the run for devices."""
        self._write("UPDATE runs SET contract = ?, status = 'running' WHERE name = ?", contract, name)

    def set_checkpoint(self, name: str, checkpoint: bytes) -> None:
        """Makes a state the run's where no round closes: before its first round, or after a device was forgotten."""
        with self.transaction():
            self._write("UPDATE runs SET checkpoint = ? WHERE name = ?", checkpoint, name)
            self._write(_NOTE_CHECKPOINT, time.time(), name)

    def checkpoints(self, run: str) -> list[Row]:
        """The states of a run that are kept, oldest first: round, completed_rounds, sha256, at."""
        return self._rows("SELECT * FROM checkpoints WHERE run = ? ORDER BY round", run)

    def set_keep_checkpoints(self, name: str, keep_checkpoints: int) -> None:
        """Sets how many of a run's states are kept, the newest; at least 1."""
        self._write("UPDATE runs SET keep_checkpoints = ? WHERE name = ?", keep_checkpoints, name)

    def _let_go_of_checkpoints(self, run: str) -> set[bytes]:
        """Lets go of the states beyond those that are kept; returns their digests."""
        beyond = (
            "FROM checkpoints WHERE run = ?1 AND round NOT IN (SELECT round FROM checkpoints WHERE run = ?1 "
            "ORDER BY round DESC LIMIT (SELECT keep_checkpoints FROM runs WHERE name = ?1))"
        )
        spent = {row["sha256"] for row in self._rows(f"SELECT sha256 {beyond}", run)}
        self._write(f"DELETE {beyond}", run)
        return spent

    def roll_back(self, run: str, number: int) -> set[bytes]:
        """Makes the state after a round the run's again, in one transaction; who owned the run has lost it.

        The rounds after it do not count any more: they are undone, and their uploads reported.

        Returns:
            Digests of the states that were let go of.

        Raises:
            RunError: The state of that round is not kept.
        """
        why = f"the run was set back to the state after round {number}"
        with self.transaction():
            kept = {row["round"]: row for row in self.checkpoints(run)}
            if number not in kept:
                raise RunError(f"run {run!r} keeps no checkpoint of round {number}")
            self.own_run(run)
            left = self.open_round(run)
            if left is not None:
                self.close_short_round(run, left["round"], why)
            later = "run = ? AND round > ?"
            asked = f"(SELECT id FROM asks WHERE {later})"
            self._write(
                f"UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'used' AND ask IN {asked}",
                *(why, run, number),
            )
            closed = f"{later} AND status = 'closed'"
            self._write(f"UPDATE rounds SET status = 'undone', reason = ? WHERE {closed}", why, run, number)
            self._write(f"DELETE FROM checkpoints WHERE {later}", run, number)
            self._write(
                "UPDATE runs SET checkpoint = ?, completed_rounds = ?, status = 'stopped', reason = ? WHERE name = ?",
                *(kept[number]["sha256"], kept[number]["completed_rounds"], why, run),
            )
            self.add_event(run, "rolled-back", why, number=number)
        return {row["sha256"] for one, row in kept.items() if one > number}

    def secure_state(self, checkpoint: bytes, state: bytes) -> None:
        """Writes a state again that was deleted before any row named it; within the transaction that names it.

        Who deletes holds the same lock.
        """
        if not self.blobs.has(checkpoint):
            self.blobs.put_state(state)

    def end_run(self, name: str, status: str, reason: str) -> None:
        """Marks the run `finished` or `stopped`; `running` opens it again. `cancel_run` is another end."""
        self._write("UPDATE runs SET status = ?, reason = ? WHERE name = ?", status, shortened(reason), name)

    def cancel_run(self, name: str, reason: str) -> bool:
        """Ends a run for good: no engine owns it any more, and an open round is short. False if it was over before."""
        with self.transaction():
            row = self.run(name)
            if row is None or row["status"] in OVER:
                return False
            self._write(
                "UPDATE runs SET status = 'cancelled', reason = ?, engine = NULL WHERE name = ?", *(reason, name)
            )
            left = self.open_round(name)
            if left is not None:
                self.close_short_round(name, left["round"], "run cancelled")
        return True

    # --- devices

    def device(self, run: str, device: str) -> Row | None:
        """The device's row in a run."""
        return self._row("SELECT * FROM devices WHERE run = ? AND device = ?", run, device)

    def devices(self, run: str) -> list[Row]:
        """All devices of a run in id order."""
        return self._rows("SELECT * FROM devices WHERE run = ? ORDER BY device", run)

    def count_devices(self, run: str) -> int:
        """How many devices have checked in to a run."""
        return int(self._value("SELECT count(*) FROM devices WHERE run = ?", run))

    def present_devices(self, run: str) -> list[str]:
        """Ids of the devices that are checked in, in bytewise order."""
        rows = self._rows(
            "SELECT device FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL ORDER BY device", run
        )
        return [row["device"] for row in rows]

    def present_profiles(self, run: str) -> dict[str, bytes]:
        """Serialized profiles of the devices that are checked in, by id in bytewise order."""
        rows = self._rows(
            "SELECT device, profile FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL "
            "ORDER BY device",
            run,
        )
        return {row["device"]: row["profile"] for row in rows}

    def ask_to_forget(self, run: str, device: str) -> bool:
        """Notes that a device is to be forgotten, and closes its open asks. False if the run has no such device."""
        with self.transaction():
            if self.device(run, device) is None:
                return False
            self._write(
                "UPDATE devices SET forget_asked_at = coalesce(forget_asked_at, ?) WHERE run = ? AND device = ?",
                time.time(),
                run,
                device,
            )
            self.device_gone(run, device, "device to be forgotten")
        return True

    def to_forget(self, run: str) -> list[str]:
        """Devices that are to be forgotten and are not yet, in id order."""
        rows = self._rows(
            "SELECT device FROM devices WHERE run = ? AND forget_asked_at IS NOT NULL AND forgotten_at IS NULL "
            "ORDER BY device",
            run,
        )
        return [row["device"] for row in rows]

    def payloads_about(self, run: str, devices: Sequence[str]) -> set[bytes]:
        """Digests of what these devices have sent in a run, and of what it has told any device: that may be of them."""
        rows = self._rows(
            "SELECT payload AS sha256 FROM asks WHERE run = ?1 AND payload IS NOT NULL UNION SELECT u.sha256 FROM "
            "uploads u JOIN asks a ON u.ask = a.id WHERE a.run = ?1 AND a.device IN (SELECT value FROM json_each(?2))",
            *(run, json.dumps(list(devices))),
        )
        return {row["sha256"] for row in rows}

    def leave_out(self, run: str, devices: Sequence[str], checkpoint: bytes) -> None:
        """Sets the state without these devices, and lets go of what they have sent and of what any device was told.

        Within a transaction, between two rounds. Rows stay; figures by class, which tell what classes it has, do not.
        """
        self._write("DELETE FROM checkpoints WHERE run = ?", run)  # the devices' parts are in them
        self.set_checkpoint(run, checkpoint)
        self._write("UPDATE asks SET given_up = 1 WHERE run = ?", run)
        for device in devices:
            self._write(
                "UPDATE uploads SET quarantined_at = coalesce(quarantined_at, ?) "
                "WHERE ask IN (SELECT id FROM asks WHERE run = ? AND device = ?)",
                *(time.time(), run, device),
            )
            self._write("UPDATE figures SET by_class = '{}' WHERE run = ? AND device = ?", run, device)

    def note_forgotten(self, run: str, device: str) -> bool:
        """Notes that nothing of a device is left; False if that was noted before."""
        sql = "UPDATE devices SET forgotten_at = ? WHERE run = ? AND device = ? AND forgotten_at IS NULL"
        return bool(self._write(sql, time.time(), run, device))

    def register_device(self, run: str, device: str, secret_hash: bytes, profile: bytes) -> bool:
        """Notes that a device is present; keeps the secret of its first check-in. False if the id has another one.

        As with `device_back`, a device that is revoked or to be forgotten is not present.
        """
        now = time.time()
        row = {"run": run, "device": device, "secret_hash": secret_hash, "profile": profile, "present": 0}
        with self.transaction():
            known = self.device(run, device)
            if known is not None and known["secret_hash"] != secret_hash:
                return False
            self._insert(
                "devices",
                {**row, "first_seen": now, "last_seen": now},
                "ON CONFLICT (run, device) DO UPDATE SET profile = excluded.profile",
            )
            self.device_back(run, device)
        return True

    def device_back(self, run: str, device: str) -> None:
        """A device that was taken for gone has called again; one that is revoked or to be forgotten stays gone."""
        sql = "UPDATE devices SET present = 1, last_seen = ? WHERE run = ? AND device = ? AND forget_asked_at IS NULL"
        self._write(f"{sql} AND NOT {_REVOKED}", time.time(), run, device)

    def note_seen(self, seen: Mapping[tuple[str, str], float]) -> None:
        """Writes when devices last called, by (run, device), in seconds since 1970."""
        with self.transaction():
            self._db.conn.executemany(
                "UPDATE devices SET last_seen = max(coalesce(last_seen, 0), ?) WHERE run = ? AND device = ?",
                [(at, run, device) for (run, device), at in seen.items()],
            )

    def device_gone(self, run: str, device: str, reason: str) -> None:
        """Ends a device's presence and closes its open asks."""
        with self.transaction():
            self._write(
                "UPDATE devices SET present = 0, last_seen = ? WHERE run = ? AND device = ?", time.time(), run, device
            )
            self._write(
                "UPDATE asks SET status = 'out', reason = ? WHERE run = ? AND device = ? AND status = 'open'",
                reason,
                run,
                device,
            )

    # --- rounds

    def open_round(self, run: str) -> Row | None:
        """The round that is under way, if any, with its cohort as a list and its data versions as a dictionary."""
        row = self._row("SELECT * FROM rounds WHERE run = ? AND status = 'open'", run)
        if row is None:
            return None
        return {**row, "cohort": json.loads(row["cohort"]), "data_versions": json.loads(row["data_versions"] or "{}")}

    def start_round(self, run: str, cohort: Sequence[str], data_versions: Mapping[str, str] | None = None) -> int:
        """Opens the next round; returns its number, counted from 1 over all rounds, short ones included.

        Args:
            run: The run.
            cohort: Ids of its devices.
            data_versions: What `open_round` gives until the round has ended.
        """
        with self.transaction():
            number = int(self._value("SELECT next_round FROM runs WHERE name = ?", run))
            self._write("UPDATE runs SET next_round = ? WHERE name = ?", number + 1, run)
            row = {"run": run, "round": number, "status": "open", "cohort": json.dumps(list(cohort))}
            versions = json.dumps(dict(data_versions)) if data_versions else None
            self._insert("rounds", {**row, "data_versions": versions, "started_at": time.time()})
        return number

    def close_round(
        self, run: str, number: int, checkpoint: bytes, used: Sequence[int], figures: Mapping[str, Any]
    ) -> set[bytes]:
        """Closes a completed round with its checkpoint, in one transaction.

        Args:
            run: The run.
            number: The round.
            checkpoint: SHA-256 of the state to go on from.
            used: Asks whose answers are in the result; other acknowledged answers of the round are reported.
            figures: What the method says about the round, JSON.

        Returns:
            Digests of checkpoints that the run keeps no longer.
        """
        with self.transaction():
            self._write(
                "UPDATE runs SET completed_rounds = completed_rounds + 1, checkpoint = ? WHERE name = ?",
                checkpoint,
                run,
            )
            self._db.conn.executemany(
                "UPDATE uploads SET status = 'used' WHERE ask = ? AND status = 'acknowledged'", [(a,) for a in used]
            )
            self._end_round(run, number, "closed", None, "the round ended without needing it", figures)
            self._write(_NOTE_CHECKPOINT, time.time(), run)
            return self._let_go_of_checkpoints(run)

    def close_short_round(self, run: str, number: int, reason: str) -> None:
        """Closes a round that fell short; its uploads are reported, the budget is not charged."""
        with self.transaction():
            why = shortened(reason)
            self._end_round(run, number, "short", why, shortened(f"round short: {why}"), {})

    def _end_round(
        self, run: str, number: int, status: str, reason: str | None, unused: str, figures: Mapping[str, Any]
    ) -> None:
        self._write(
            "UPDATE rounds SET status = ?, reason = ?, figures = ?, ended_at = ?, data_versions = NULL "
            "WHERE run = ? AND round = ?",
            *(status, reason, json.dumps(figures), time.time(), run, number),
        )
        self._write(
            "UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'acknowledged' "
            "AND ask IN (SELECT id FROM asks WHERE run = ? AND round = ?)",
            *(unused, run, number),
        )
        self._write(
            "UPDATE asks SET status = 'out', reason = 'round closed' WHERE run = ? AND round = ? AND status = 'open'",
            *(run, number),
        )
        self._note_late(run, number)

    def _note_late(self, run: str, number: int) -> None:
        """Leaves devices that missed a deadline in several rounds in a row out of the next ones, ever longer."""
        rows = self._rows(
            "SELECT a.device, max(coalesce(a.reason, '') = ?) AS late, max(a.status = 'answered') AS answered, "
            "d.late_rounds FROM asks a JOIN devices d ON d.run = a.run AND d.device = a.device "
            "WHERE a.run = ? AND a.round = ? GROUP BY a.device",
            *(DEADLINE_PASSED, run, number),
        )
        for row in rows:
            in_a_row = row["late_rounds"] + 1 if row["late"] else 0 if row["answered"] else row["late_rounds"]
            rounds = rounds_left_out(in_a_row) if row["late"] else 0
            self._write(
                "UPDATE devices SET late_rounds = ?, left_out_until = ? WHERE run = ? AND device = ?",
                *(in_a_row, number + rounds, run, row["device"]),
            )
            if rounds:
                text = f"{row['device']} missed a deadline in {in_a_row} rounds in a row; it is left out up to round "
                self.add_event(run, "left-out", f"{text}{number + rounds}", number=number, device=row["device"])

    def left_out(self, run: str, number: int) -> dict[str, int]:
        """Devices that are left out of a round because they were late again and again, with the last such round."""
        rows = self._rows(
            "SELECT device, left_out_until FROM devices WHERE run = ? AND left_out_until >= ? ORDER BY device",
            *(run, number),
        )
        return {row["device"]: row["left_out_until"] for row in rows}

    # --- what must be kept; `retention.py` deletes the rest

    def set_keep_rounds(self, run: str, keep_rounds: int) -> None:
        """Sets of how many closed rounds the payloads stay readable, the newest first; at least 0."""
        self._write("UPDATE runs SET keep_rounds = ? WHERE name = ?", keep_rounds, run)

    def first_kept_round(self, run: str, keep_rounds: int | None = None) -> int:
        """The first round whose payloads are kept: so many closed ones, short ones after them, and the open one.

        Args:
            run: The run.
            keep_rounds: How many closed ones, by default the run's setting.
        """
        row = self._row("SELECT keep_rounds, kept_from FROM runs WHERE name = ?", run) or {}
        wanted = row["keep_rounds"] if keep_rounds is None else keep_rounds
        closed = self._rows(
            "SELECT round FROM rounds WHERE run = ? AND status = 'closed' ORDER BY round DESC LIMIT ?",
            *(run, max(wanted, 1)),
        )
        if wanted == 0:
            first = closed[0]["round"] + 1 if closed else 0
        else:
            first = closed[-1]["round"] if len(closed) == wanted else 0
        return max(first, int(row["kept_from"]))

    def prune_rounds(self, run: str, first_kept: int) -> tuple[int, int]:
        """Gives up the payloads, events and figures of all rounds before `first_kept`; receipts and traffic stay.

        Returns:
            How many events and figures that were.
        """
        old = "WHERE run = ? AND round > 0 AND round < ?"
        with self.transaction():
            self._write("UPDATE runs SET kept_from = max(kept_from, ?) WHERE name = ?", first_kept, run)
            events = self._write(f"DELETE FROM events {old}", run, first_kept)
            return events, self._write(f"DELETE FROM figures {old}", run, first_kept)

    def delete_run(self, run: str) -> tuple[int, int]:
        """Forgets a run with everything that was written about it, but for who was enrolled.

        Returns:
            How many events and figures it had.
        """
        with self.transaction():
            self._write("DELETE FROM uploads WHERE ask IN (SELECT id FROM asks WHERE run = ?)", run)
            for table in ("asks", "rounds", "traffic", "devices", "checkpoints"):
                self._write(f"DELETE FROM {table} WHERE run = ?", run)
            self._write("DELETE FROM runs WHERE name = ?", run)
            events = self._write("DELETE FROM events WHERE run = ?", run)
            return events, self._write("DELETE FROM figures WHERE run = ?", run)

    def payloads_between(self, run: str, first: int, stop: int) -> set[bytes]:
        """Digests of the payloads that rounds `first` to `stop` - 1 of a run speak of."""
        rows = self._rows(
            "SELECT DISTINCT sha256 FROM spoken WHERE run = ? AND round >= ? AND round < ?", run, first, stop
        )
        return {row["sha256"] for row in rows}

    def open_asks(self) -> set[int]:
        """Ids of the asks of all runs that still take an answer."""
        return {row["id"] for row in self._rows("SELECT id FROM asks WHERE status = 'open'")}

    def short_rounds_in_a_row(self, run: str) -> int:
        """How many rounds have fallen short since the last one that was completed."""
        return int(
            self._value(
                "SELECT count(*) FROM rounds WHERE run = ?1 AND status = 'short' AND round > "
                "(SELECT coalesce(max(round), 0) FROM rounds WHERE run = ?1 AND status = 'closed')",
                run,
            )
        )

    def rounds(self, run: str) -> list[Row]:
        """Every round with its uploads counted by what became of them."""
        return self._rows(
            "SELECT r.*, (SELECT count(*) FROM uploads u JOIN asks a ON u.ask = a.id WHERE a.run = r.run AND "
            "a.round = r.round AND u.status = 'used') AS used, (SELECT count(*) FROM uploads u JOIN asks a ON "
            "u.ask = a.id WHERE a.run = r.run AND a.round = r.round AND u.status = 'reported') AS reported "
            "FROM rounds r WHERE run = ? ORDER BY round",
            run,
        )

    # --- asks and answers

    def write_asks(self, rows: Sequence[Row]) -> None:
        """Writes the asks of one step; those that are there are left as they are.

        They are open, but for devices that have gone: nobody waits for these. They are looked up in the transaction
        that writes, so a device that leaves or is revoked meanwhile either is seen here or closes its ask itself.
        """
        with self.transaction():
            for row in rows:
                gone = self._value(_WHY_GONE, row["run"], row["device"])
                status = {"status": "out" if gone else "open", "reason": gone, "expects": json.dumps(row["expects"])}
                self._insert("asks", {**row, **status}, "ON CONFLICT (run, round, step_number, device) DO NOTHING")

    def asks(self, run: str, number: int, step_number: int) -> list[Row]:
        """The asks of one step in device order, each joined with its answer (columns NULL without one)."""
        return self._rows(
            "SELECT a.*, u.sha256, u.samples, u.receipt FROM asks a LEFT JOIN uploads u ON u.ask = a.id "
            "AND u.quarantined_at IS NULL WHERE a.run = ? AND a.round = ? AND a.step_number = ? ORDER BY a.device",
            *(run, number, step_number),
        )

    def ask(self, run: str, number: int, step_number: int, device: str) -> Row | None:
        """One ask by its name."""
        return self._row(
            "SELECT * FROM asks WHERE run = ? AND round = ? AND step_number = ? AND device = ?",
            *(run, number, step_number, device),
        )

    def next_ask(self, run: str, device: str) -> Row | None:
        """The oldest open ask of a device."""
        return self._row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND status = 'open' ORDER BY id LIMIT 1", run, device
        )

    def devices_with_open_asks(self, run: str) -> set[str]:
        """Devices that have something to do."""
        rows = self._rows("SELECT DISTINCT device FROM asks WHERE run = ? AND status = 'open'", run)
        return {row["device"] for row in rows}

    def ask_naming(self, run: str, device: str, sha256: bytes) -> Row | None:
        """The ask of this device that names a payload; of several an open one, then the newest."""
        return self._row(
            "SELECT * FROM asks WHERE run = ? AND device = ? AND payload = ? ORDER BY status = 'open' DESC, id DESC "
            "LIMIT 1",
            *(run, device, sha256),
        )

    def bound_deadlines(self, run: str, seconds: float) -> None:
        """Gives no open ask more than so many seconds from now: the clock may have been set back meanwhile."""
        latest = self.clock.now() + seconds
        self._write("UPDATE asks SET deadline_at = min(deadline_at, ?) WHERE run = ? AND status = 'open'", latest, run)

    def expire_asks(self, run: str, now: float) -> list[Row]:
        """Closes the open asks whose deadline has passed, with an event each; returns them.

        Args:
            run: The run.
            now: Seconds since 1970, of `clock`.
        """
        with self.transaction():
            late = self._rows("SELECT * FROM asks WHERE run = ? AND status = 'open' AND deadline_at < ?", run, now)
            for ask in late:
                self.close_ask(ask["id"], DEADLINE_PASSED)
                text = f"{ask['device']} did not answer step {ask['step']!r} in time"
                self.add_event(run, "late", text, number=ask["round"], device=ask["device"])
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
        with self.transaction():
            answered = self._value(
                "SELECT count(*) FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered' "
                "AND device IN (SELECT value FROM json_each(?))",
                *(run, number, step_number, json.dumps(list(among))),
            )
            if answered < enough:
                return False
            self._write(
                "UPDATE asks SET status = 'out', reason = 'enough devices answered' WHERE run = ? AND round = ? "
                "AND step_number = ? AND status = 'open'",
                *(run, number, step_number),
            )
        return True

    def close_ask(self, ask: int, reason: str) -> None:
        """Puts the device of an open ask out for the round."""
        sql = "UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'"
        self._write(sql, shortened(reason), ask)

    def upload_of(self, ask: int) -> Row | None:
        """The accepted answer to an ask; not one whose payload is lost."""
        return self._row("SELECT * FROM uploads WHERE ask = ? AND quarantined_at IS NULL", ask)

    def attempts_spent(self, ask: int) -> int:
        """The highest attempt among the accepted answers to an ask whose payloads are lost; 0 for none."""
        return int(
            self._value("SELECT max(attempt) FROM uploads WHERE ask = ? AND quarantined_at IS NOT NULL", ask) or 0
        )

    def take_back_upload(self, ask: int, why: str) -> None:
        """Reports the accepted answer to an ask, whose payload is lost, with an event.

        Its device is asked again, under the same deadline, while the round is open; otherwise it is out for the round.
        An answer that is taken back already stays as it is.

        Args:
            ask: Id of the ask.
            why: What is wrong with the payload.
        """
        with self.transaction():
            row = self._row(_ANSWERED_ASK, ask)
            if row is None:
                return
            late = row["deadline_at"] < self.clock.now()
            out = "deadline passed" if late else "device not present" if not row["present"] else "round closed"
            again = row["round_status"] == "open" and not late and row["present"]
            self._write(
                "UPDATE uploads SET status = 'reported', reason = ?, quarantined_at = ? WHERE receipt = ?",
                *(shortened(f"its payload was lost on the server: {why}"), time.time(), row["receipt"]),
            )
            self._write(
                "UPDATE asks SET status = ?, reason = ? WHERE id = ?",
                *("open" if again else "out", None if again else f"its answer was lost on the server, {out}", ask),
            )
            then = "it is asked again" if again else f"it is out for the round: {out}"
            text = f"the answer of {row['device']} to step {row['step']!r} is lost on the server; {then}. {why}"
            self.add_event(row["run"], "quarantined", text, number=row["round"], device=row["device"])

    def accept_upload(self, ask: int, attempt: int, sha256: bytes, data_bytes: int, samples: int) -> Row | None:
        """Records an answer, once; the first one wins.

        Returns:
            The row of the accepted answer, an earlier one if there is one; None if the ask takes no answer any more.
        """
        with self.transaction():
            known = self.upload_of(ask)
            if known is not None:
                return known
            if not self._write("UPDATE asks SET status = 'answered' WHERE id = ? AND status = 'open'", ask):
                return None
            row = {"receipt": secrets.token_hex(16), "ask": ask, "attempt": attempt, "sha256": sha256}
            row |= {"data_bytes": data_bytes, "samples": samples, "received_at": time.time(), "status": "acknowledged"}
            self._insert("uploads", row)
        return {**row, "reason": None, "quarantined_at": None}

    def uploads(self, run: str) -> list[Row]:
        """Every accepted answer of a run with its ask."""
        return self._rows(
            "SELECT a.round, a.step, a.step_number, a.device, u.* FROM uploads u JOIN asks a ON u.ask = a.id "
            "WHERE a.run = ? ORDER BY u.received_at",
            run,
        )

    # --- tokens, certificates, revocations

    def add_tokens(self, hashes: Mapping[bytes, str], run: str, expires_at: float) -> None:
        """Keeps the SHA-256 of new enrolment tokens, each with the device that it is for; empty for any."""
        row = {"run": run, "created_at": time.time(), "expires_at": expires_at, "revoked": 0}
        with self.transaction():
            for one, device in hashes.items():
                self._insert("tokens", {"hash": one, "for_device": device, **row})

    def token(self, token_hash: bytes) -> Row | None:
        """An enrolment token by the SHA-256 of its secret."""
        return self._row("SELECT * FROM tokens WHERE hash = ?", token_hash)

    def tokens(self) -> list[Row]:
        """All enrolment tokens, oldest first."""
        return self._rows("SELECT * FROM tokens ORDER BY created_at, hash")

    def knows_device(self, device: str) -> bool:
        """Whether a device of this id has enrolled, or checked in to any run."""
        sql = "SELECT 1 FROM certificates WHERE device = ? UNION ALL SELECT 1 FROM devices WHERE device = ? LIMIT 1"
        return bool(self._value(sql, device, device))

    def revoke_tokens(self, prefix: str) -> int:
        """Revokes the unused tokens whose hash begins with these hex digits; returns how many that were."""
        sql = "UPDATE tokens SET revoked = 1 WHERE revoked = 0 AND device IS NULL AND instr(lower(hex(hash)), ?) = 1"
        return self._write(sql, prefix)

    def use_token(self, token_hash: bytes, certificate: Mapping[str, Any]) -> None:
        """Marks a token as used and records the certificate that it was used for, in one transaction."""
        with self.transaction():
            self.add_certificate(certificate)
            self._write(
                "UPDATE tokens SET device = ?, serial = ? WHERE hash = ?",
                *(certificate["device"], certificate["serial"], token_hash),
            )

    def add_certificate(self, certificate: Mapping[str, Any]) -> None:
        """Records a certificate and forgets those of its device that have expired."""
        with self.transaction():
            self._write(
                "DELETE FROM certificates WHERE device = ? AND expires_at < ?", certificate["device"], time.time()
            )
            self._insert("certificates", certificate)

    def certificates(self, device: str) -> list[Row]:
        """Certificates of a device, the newest last."""
        return self._rows("SELECT * FROM certificates WHERE device = ? ORDER BY expires_at, issued_at", device)

    def certificate(self, serial: str) -> Row | None:
        """A certificate by its serial number in hex."""
        return self._row("SELECT * FROM certificates WHERE serial = ?", serial)

    def revoke(self, subject: str, reason: str) -> bool:
        """Shuts out a device, a person or a certificate, for good; False if it was so already."""
        row = {"subject": subject, "reason": shortened(reason), "at": time.time()}
        with self.transaction():
            known = self.revocation(subject, "") is not None
            self._insert("revocations", row, "ON CONFLICT (subject) DO NOTHING")
        return not known

    def revocation(self, holder: str, certificate: str) -> Row | None:
        """Whether a holder or its certificate was revoked: `device:ID` and `serial:HEX`."""
        return self._row("SELECT * FROM revocations WHERE subject IN (?, ?) LIMIT 1", holder, certificate)

    def is_revoked(self, holder: str, certificate: str) -> bool:
        """The same in short, for every call that a server answers."""
        sql = "SELECT 1 FROM revocations WHERE subject IN (?, ?) LIMIT 1"
        with self._lock, _database_errors():
            return self._db.conn.execute(sql, (holder, certificate)).fetchone() is not None

    def revocations(self) -> list[Row]:
        """Everything that was revoked, oldest first."""
        return self._rows("SELECT * FROM revocations ORDER BY at")

    # --- what happened

    def add_event(self, run: str, kind: str, text: str, *, number: int = 0, device: str = "", code: str = "") -> None:
        """Notes something that a person may want to know later; of a long text its beginning."""
        row = {"run": run, "round": number, "device": device, "kind": kind, "code": code, "text": shortened(text)}
        with self.transaction():
            self._insert("events", {**row, "at": time.time()})
            self._to_log.append(row)

    def note_refusals_left_out(self, run: str, device: str, text: str, known: int | None) -> int | None:
        """Says how many refusals of a device are not noted one by one; returns the event, to be `known` next time."""
        same = "id = ? AND run = ? AND device = ? AND kind = 'refusals-left-out'"  # ids of pruned events come again
        if known is not None and self._write(
            f"UPDATE events SET text = ?, at = ? WHERE {same}", *(text, time.time(), known, run, device)
        ):
            return known
        self.add_event(run, "refusals-left-out", text, device=device)
        return int(self._value("SELECT max(id) FROM events"))

    def events(self, run: str, kind: str | None = None) -> list[Row]:
        """Events of a run, oldest first."""
        return self._rows("SELECT * FROM events WHERE run = ? AND (? IS NULL OR kind = ?) ORDER BY id", run, kind, kind)

    def has_event(self, run: str, kind: str, device: str, number: int | None = None, text: str | None = None) -> bool:
        """Whether there is such an event of a device; in any round and with any text unless they are given."""
        found = self._value(
            "SELECT 1 FROM events WHERE run = ?1 AND kind = ?2 AND device = ?3 "
            "AND (?4 IS NULL OR round = ?4) AND (?5 IS NULL OR text = ?5) LIMIT 1",
            *(run, kind, device, number, None if text is None else shortened(text)),
        )
        return found is not None

    def newest_events(self, run: str, most: int) -> list[Row]:
        """The newest events of a run, oldest first."""
        return self._rows("SELECT * FROM events WHERE run = ? ORDER BY id DESC LIMIT ?", run, most)[::-1]

    def count_events(self, run: str) -> int:
        """How many events a run has."""
        return int(self._value("SELECT count(*) FROM events WHERE run = ?", run))

    def last_event(self, run: str) -> Row | None:
        """The newest event of a run."""
        return self._row("SELECT * FROM events WHERE run = ? ORDER BY id DESC LIMIT 1", run)

    def add_figures(self, run: str, number: int, device: str, metrics: Metrics) -> None:
        """Stores what a device reports about itself."""
        for metric in metrics.metrics:
            by_class = {one.label: [one.sum, one.count] for one in metric.by_class}
            row = {"run": run, "round": number, "device": device, "name": metric.name, "split": metric.split}
            row |= {"sum": metric.sum, "count": metric.count, "by_class": json.dumps(by_class)}
            self._insert(
                "figures",
                row,
                "ON CONFLICT DO UPDATE SET sum=excluded.sum, count=excluded.count, by_class=excluded.by_class",
            )

    def figures(self, run: str, name: str, split: str) -> list[Row]:
        """One figure over rounds and devices."""
        return self._rows(
            "SELECT * FROM figures WHERE run = ? AND name = ? AND split = ? ORDER BY round, device", run, name, split
        )

    def newest_figures(self, run: str, name: str, split: str) -> list[Row]:
        """Of each device the newest of a figure, and of those named like `ANSWER/NAME`, by name and device."""
        return self._rows(  # beside max(), SQLite takes the other columns from the row that has it
            "SELECT device, name, sum, count, max(round) AS round FROM figures WHERE run = ? AND split = ? "
            "AND (name = ? OR name GLOB ?) GROUP BY name, device ORDER BY name, device",
            *(run, split, name, f"?*/{name}"),
        )

    def add_traffic(
        self, run: str, number: int, device: str, direction: str, counted: Counted, envelope_bytes: int
    ) -> None:
        """Adds one payload, or the part of it that was sent, to the count of what went over the link."""
        name = {"run": run, "round": number, "device": device, "direction": direction}
        with self.transaction():
            self._count_bytes({**name, "kind": ENVELOPE}, 1, 0, envelope_bytes, envelope_bytes)
            for kind in sorted(counted.tensor.keys() | counted.sent.keys()):
                self._count_bytes({**name, "kind": kind}, 0, counted.tensor[kind], 0, counted.sent[kind])

    def add_refused_traffic(self, ask: int, sent_bytes: int) -> None:
        """Counts what travelled for an answer to an ask and was not taken; no tensor bytes, as no answer was made."""
        with self.transaction():
            name = self._row("SELECT run, round, device FROM asks WHERE id = ?", ask)
            if name is not None and sent_bytes:
                self._count_bytes({**name, "direction": "up", "kind": REFUSED}, 0, 0, 0, sent_bytes)

    def _count_bytes(self, name: Row, payloads: int, tensor: int, envelope: int, sent: int) -> None:
        columns = {"payloads": payloads, "tensor_bytes": tensor, "envelope_bytes": envelope, "sent_bytes": sent}
        added = ", ".join(f"{column} = {column} + excluded.{column}" for column in columns)
        self._insert("traffic", {**name, **columns}, f"ON CONFLICT DO UPDATE SET {added}")

    def traffic(self, run: str) -> list[Row]:
        """Bytes by round, device and direction: tensors and headers as they are, `sent_bytes` all as it travelled."""
        return self._rows(
            "SELECT run, round, device, direction, sum(payloads) AS payloads, sum(tensor_bytes) AS tensor_bytes, "
            "sum(envelope_bytes) AS envelope_bytes, sum(sent_bytes) AS sent_bytes FROM traffic WHERE run = ? "
            "GROUP BY round, device, direction ORDER BY round, device, direction",
            run,
        )

    def traffic_by_kind(self, run: str) -> list[Row]:
        """The same by kind of part too; the headers' kind is "envelope", that of rows of an older version is empty."""
        return self._rows("SELECT * FROM traffic WHERE run = ? ORDER BY round, device, direction, kind", run)

    # --- following a run

    def progress(self, run: str, after_event: int = 0) -> Progress | None:
        """A run as it stands, or None if there is none of that name. Once it is over, nothing is missing.

        Args:
            run: The run.
            after_event: Number of the last event that is known already.
        """
        row = self._row(RUN_PROGRESS, run)  # first: what is read after its end is all there is
        if row is None:
            return None
        config = json.loads(row.pop("config")).get("run", {})
        said = {**row, "method": config.get("method", ""), "wanted_rounds": config.get("rounds") or None}
        return Progress(
            run={**said, "reason": row["reason"] or ""},
            rounds=self._rows(ROUND_PROGRESS, run),
            steps=self._rows(STEP_PROGRESS, run),
            events=self._rows("SELECT * FROM events WHERE run = ? AND id > ? ORDER BY id", run, after_event),
        )


_REVOKED = "EXISTS (SELECT 1 FROM revocations WHERE subject = 'device:' || device)"
"""Whether a row's device was revoked, for the condition of a statement on `devices`."""

_NOTE_CHECKPOINT = """
INSERT OR REPLACE INTO checkpoints (run, round, completed_rounds, sha256, at)
SELECT name, (SELECT coalesce(max(round), 0) FROM rounds WHERE run = name AND status = 'closed'), completed_rounds,
checkpoint, ? FROM runs WHERE name = ?
"""

_WHY_GONE = f"""
SELECT CASE WHEN {_REVOKED} THEN 'device revoked' ELSE 'device not present' END
FROM devices WHERE run = ? AND device = ? AND (NOT present OR {_REVOKED})
"""

_ANSWERED_ASK = """
SELECT a.*, u.receipt, r.status AS round_status, coalesce(d.present, 1) AS present
FROM asks a
JOIN uploads u ON u.ask = a.id AND u.quarantined_at IS NULL
LEFT JOIN rounds r ON r.run = a.run AND r.round = a.round
LEFT JOIN devices d ON d.run = a.run AND d.device = a.device
WHERE a.id = ?
"""


def _use_wal(connection: sqlite3.Connection) -> None:
    """Two processes that switch a new database at the same moment are told BUSY at once, whatever the timeout."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpaceError("the database failed: the disk is full") from error
        raise StoreError(in_our_words(error)) from error
