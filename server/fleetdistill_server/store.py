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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlite_utils

from fleetdistill.errors import RunError, StoreError
from fleetdistill.knowledge import Metrics
from fleetdistill_server.blobs import Blobs, FileBlobs, MemoryBlobs, disk_errors
from fleetdistill_server.schema import migrations

Row = dict[str, Any]
_BUSY_SECONDS = 30


class Store:
    """Runs, rounds, asks, answers and what happened. See the module's docstring.

    Attributes:
        blobs: Payloads and checkpoints.
    """

    def __init__(self, connection: sqlite3.Connection, blobs: Blobs, journal_mode: str) -> None:
        self.blobs = blobs
        self._lock = threading.RLock()
        self._db = sqlite_utils.Database(connection)
        try:
            with _database_errors():
                self._assert_durable(journal_mode)
            with self.transaction():  # of several processes that open a new store, one makes the tables
                migrations.apply(self._db)
        except StoreError:
            connection.close()
            raise

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Opens the store in a directory, makes it if need be, and brings its tables up to date.

        Raises:
            StoreError: The directory cannot be used, or the database is damaged.
        """
        with disk_errors(f"opening the store {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
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

    def begin_run(
        self,
        name: str,
        config: Mapping[str, Any],
        completed: Callable[[dict[str, Any]], dict[str, Any]] = lambda known: known,
    ) -> None:
        """Registers a run, or finds it again.

        Args:
            name: The run.
            config: Its settings.
            completed: Adds to settings that an earlier version has stored what this version knows beside them.

        Raises:
            RunError: The run exists with another configuration; the message says what changed.
        """
        with self.transaction():
            known = self.run(name)
            if known is not None:
                _refuse_changes(name, completed(json.loads(known["config"])), json.loads(json.dumps(config)))
                return
            row = {"name": name, "config": json.dumps(config), "status": "preparing", "created_at": time.time()}
            self._insert("runs", {**row, "completed_rounds": 0, "next_round": 1})

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

    def own_run(self, name: str) -> str:
        """Makes the caller the run's only engine; returns the token that its later writes must carry."""
        token = secrets.token_hex(8)
        self._write("UPDATE runs SET engine = ? WHERE name = ?", token, name)
        return token

    def assert_owner(self, name: str, token: str) -> None:
        """Raises RunError if another engine has taken the run over since `own_run`."""
        if self._value("SELECT engine FROM runs WHERE name = ?", name) != token:
            raise RunError(f"run {name!r} was taken over by another engine")

    def publish_contract(self, name: str, contract: bytes) -> None:
        """Opens the run for devices."""
        self._write("UPDATE runs SET contract = ?, status = 'running' WHERE name = ?", contract, name)

    def set_checkpoint(self, name: str, checkpoint: bytes) -> None:
        """Keeps the state that a run starts from, before its first round."""
        self._write("UPDATE runs SET checkpoint = ? WHERE name = ?", checkpoint, name)

    def end_run(self, name: str, status: str, reason: str) -> None:
        """Marks the run `finished` or `stopped`; `running` opens it again."""
        self._write("UPDATE runs SET status = ?, reason = ? WHERE name = ?", status, reason, name)

    # --- devices

    def device(self, run: str, device: str) -> Row | None:
        """The device's row in a run."""
        return self._row("SELECT * FROM devices WHERE run = ? AND device = ?", run, device)

    def devices(self, run: str) -> list[Row]:
        """All devices of a run in id order."""
        return self._rows("SELECT * FROM devices WHERE run = ? ORDER BY device", run)

    def present_devices(self, run: str) -> list[str]:
        """Ids of the devices that are checked in, in bytewise order."""
        rows = self._rows("SELECT device FROM devices WHERE run = ? AND present = 1 ORDER BY device", run)
        return [row["device"] for row in rows]

    def register_device(self, run: str, device: str, secret_hash: bytes, profile: bytes) -> bool:
        """Notes that a device is present; keeps the secret of its first check-in. False if the id has another one."""
        now = time.time()
        row = {"run": run, "device": device, "secret_hash": secret_hash, "profile": profile, "present": 1}
        with self.transaction():
            known = self.device(run, device)
            if known is not None and known["secret_hash"] != secret_hash:
                return False
            self._insert(
                "devices",
                {**row, "first_seen": now, "last_seen": now},
                "ON CONFLICT (run, device) DO UPDATE SET profile = excluded.profile, present = 1, "
                "last_seen = excluded.last_seen",
            )
        return True

    def device_back(self, run: str, device: str) -> None:
        """A device that was taken for gone has called again."""
        self._write(
            "UPDATE devices SET present = 1, last_seen = ? WHERE run = ? AND device = ?", time.time(), run, device
        )

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
        """The round that is under way, if any, with its cohort as a list."""
        row = self._row("SELECT * FROM rounds WHERE run = ? AND status = 'open'", run)
        return None if row is None else {**row, "cohort": json.loads(row["cohort"])}

    def start_round(self, run: str, cohort: Sequence[str]) -> int:
        """Opens the next round; returns its number, counted from 1 over all rounds, short ones included."""
        with self.transaction():
            number = int(self._value("SELECT next_round FROM runs WHERE name = ?", run))
            self._write("UPDATE runs SET next_round = ? WHERE name = ?", number + 1, run)
            row = {"run": run, "round": number, "status": "open", "cohort": json.dumps(list(cohort))}
            self._insert("rounds", {**row, "started_at": time.time()})
        return number

    def close_round(
        self, run: str, number: int, checkpoint: bytes, used: Sequence[int], figures: Mapping[str, Any]
    ) -> None:
        """Closes a completed round with its checkpoint, in one transaction.

        Args:
            run: The run.
            number: The round.
            checkpoint: SHA-256 of the state to go on from.
            used: Asks whose answers are in the result; other acknowledged answers of the round are reported.
            figures: What the method says about the round, JSON.
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

    def close_short_round(self, run: str, number: int, reason: str) -> None:
        """Closes a round that fell short; its uploads are reported, the budget is not charged."""
        with self.transaction():
            self._end_round(run, number, "short", reason, f"round short: {reason}", {})

    def _end_round(
        self, run: str, number: int, status: str, reason: str | None, unused: str, figures: Mapping[str, Any]
    ) -> None:
        self._write(
            "UPDATE rounds SET status = ?, reason = ?, figures = ?, ended_at = ? WHERE run = ? AND round = ?",
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

    def rounds_since_last_closed(self, run: str, number: int) -> range:
        """The last closed round before `number`, and the short ones between the two."""
        last = self._value(
            "SELECT max(round) FROM rounds WHERE run = ? AND round < ? AND status = 'closed'", run, number
        )
        return range(last or number, number)

    def spent_payloads(self, run: str, number: int) -> list[bytes]:
        """Payloads of a round that no later round and no other run speaks of."""
        rows = self._rows(
            "SELECT DISTINCT mine.sha256 FROM spoken mine WHERE mine.run = ? AND mine.round = ? AND NOT EXISTS "
            "(SELECT 1 FROM spoken s WHERE s.sha256 = mine.sha256 AND (s.run <> mine.run OR s.round > mine.round))",
            *(run, number),
        )
        return [row["sha256"] for row in rows]

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
        """Writes the asks of one step, open unless a row says otherwise; those that are there are left as they are."""
        with self.transaction():
            for row in rows:
                full = {"status": "open", **row, "expects": json.dumps(row["expects"])}
                self._insert("asks", full, "ON CONFLICT (run, round, step_number, device) DO NOTHING")

    def asks(self, run: str, number: int, step_number: int) -> list[Row]:
        """The asks of one step in device order, each joined with its answer (columns NULL without one)."""
        return self._rows(
            "SELECT a.*, u.sha256, u.samples, u.receipt FROM asks a LEFT JOIN uploads u ON u.ask = a.id "
            "WHERE a.run = ? AND a.round = ? AND a.step_number = ? ORDER BY a.device",
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

    def is_payload_for(self, run: str, device: str, sha256: bytes) -> bool:
        """Whether an ask of this device names the payload."""
        return bool(
            self._value("SELECT 1 FROM asks WHERE run = ? AND device = ? AND payload = ? LIMIT 1", run, device, sha256)
        )

    def expire_asks(self, run: str, now: float) -> list[Row]:
        """Closes the open asks whose deadline has passed, with an event each; returns them."""
        with self.transaction():
            late = self._rows("SELECT * FROM asks WHERE run = ? AND status = 'open' AND deadline_at < ?", run, now)
            for ask in late:
                self.close_ask(ask["id"], "deadline passed")
                text = f"{ask['device']} did not answer step {ask['step']!r} in time"
                self.add_event(run, "late", text, number=ask["round"], device=ask["device"])
        return late

    def end_step(self, run: str, number: int, step_number: int, enough: int) -> bool:
        """Closes the asks of a step that are still open once it has enough answers; False while it has not."""
        with self.transaction():
            answered = self._value(
                "SELECT count(*) FROM asks WHERE run = ? AND round = ? AND step_number = ? AND status = 'answered'",
                *(run, number, step_number),
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
        self._write("UPDATE asks SET status = 'out', reason = ? WHERE id = ? AND status = 'open'", reason, ask)

    def upload_of(self, ask: int) -> Row | None:
        """The accepted answer to an ask."""
        return self._row("SELECT * FROM uploads WHERE ask = ?", ask)

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
        return {**row, "reason": None}

    def uploads(self, run: str) -> list[Row]:
        """Every accepted answer of a run with its ask."""
        return self._rows(
            "SELECT a.round, a.step, a.step_number, a.device, u.* FROM uploads u JOIN asks a ON u.ask = a.id "
            "WHERE a.run = ? ORDER BY u.received_at",
            run,
        )

    # --- what happened

    def add_event(self, run: str, kind: str, text: str, *, number: int = 0, device: str = "", code: str = "") -> None:
        """Notes something that a person may want to know later."""
        row = {"run": run, "round": number, "device": device, "kind": kind, "code": code, "text": text}
        self._insert("events", {**row, "at": time.time()})

    def events(self, run: str, kind: str | None = None) -> list[Row]:
        """Events of a run, oldest first."""
        return self._rows("SELECT * FROM events WHERE run = ? AND (? IS NULL OR kind = ?) ORDER BY id", run, kind, kind)

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

    def add_traffic(
        self, run: str, number: int, device: str, direction: str, tensor_bytes: int, envelope_bytes: int
    ) -> None:
        """Adds one payload to the count of what went over the link."""
        row = {"run": run, "round": number, "device": device, "direction": direction, "payloads": 1}
        self._insert(
            "traffic",
            {**row, "tensor_bytes": tensor_bytes, "envelope_bytes": envelope_bytes},
            "ON CONFLICT DO UPDATE SET payloads = payloads + 1, tensor_bytes = tensor_bytes + excluded.tensor_bytes, "
            "envelope_bytes = envelope_bytes + excluded.envelope_bytes",
        )

    def traffic(self, run: str) -> list[Row]:
        """Bytes by round, device and direction."""
        return self._rows("SELECT * FROM traffic WHERE run = ? ORDER BY round, device, direction", run)


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
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise StoreError(f"the database failed: {'the disk is full' if full else error}") from error


def _refuse_changes(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    before, after = _flat(known), _flat(given)
    changed = [
        f"{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if changed:
        raise RunError(
            f"run {name!r} exists with another configuration: {'; '.join(changed)}; "
            "put the old values back, or give the changed run a new name"
        )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()}
