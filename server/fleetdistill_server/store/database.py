"""SQLite database of a store: connection, transactions and errors.

The database runs in WAL mode with `synchronous=FULL`, and both are verified on opening: a commit is durable when it
returns.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlite_utils

from fleetdistill.errors import NoSpaceError, StoreError
from fleetdistill_server.logs import log_event
from fleetdistill_server.store.checks import check_database, database_message

Row = dict[str, Any]
_BUSY_SECONDS = 30


class Database:
    """One SQLite connection. Threads share it through a lock; each process opens its own.

    Attributes:
        tables: The connection as a `sqlite_utils.Database`.
    """

    def __init__(self, connection: sqlite3.Connection, journal_mode: str) -> None:
        self.tables = sqlite_utils.Database(connection)
        self._lock = threading.RLock()
        self._to_log: list[Row] = []  # events of the open transaction
        try:
            with database_errors():
                self._assert_durable(journal_mode)
        except StoreError:
            connection.close()
            raise

    @classmethod
    def open(cls, path: Path) -> Database:
        """Opens a database file, or creates it. Raises StoreError if it cannot be used."""
        with database_errors():
            connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            _use_wal(connection)
        return cls(connection, "wal")

    @classmethod
    def in_memory(cls) -> Database:
        """Returns a database that exists only in memory."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        return cls(connection, "memory")

    def _assert_durable(self, journal_mode: str) -> None:
        self.tables.execute("PRAGMA synchronous=FULL")
        self.tables.execute("PRAGMA fullfsync=ON")  # required on macOS to flush the drive's cache
        found = (self.value("PRAGMA journal_mode"), self.value("PRAGMA synchronous"))
        if found != (journal_mode, 2):
            raise StoreError(
                f"the database opened with (journal_mode, synchronous) = {found}, expected ({journal_mode!r}, 2); "
                "put the store on a local file system"
            )

    def check(self) -> None:
        """Reads the whole database. Raises StoreError if it is damaged."""
        with self._lock, database_errors():
            check_database(self.tables)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self.tables.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Combines several calls into one transaction; nested transactions are savepoints.

        Raises:
            StoreError: The database could not be written, for example because the disk is full.
        """
        with self._lock, database_errors():
            before = len(self._to_log)
            try:
                if self.tables.conn.in_transaction:
                    with self.tables.atomic():
                        yield
                    return
                self.tables.conn.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self.tables.conn.execute("COMMIT")
                except BaseException:
                    self.tables.rollback()
                    raise
            except BaseException:
                del self._to_log[before:]
                raise
            committed, self._to_log = self._to_log, []
        for row in committed:
            log_event(row)

    def log(self, row: Row) -> None:
        """Logs an event after the open transaction has been committed."""
        self._to_log.append(row)

    def rows(self, sql: str, *values: Any) -> list[Row]:
        with self._lock, database_errors():
            return list(self.tables.query(sql, values))

    def row(self, sql: str, *values: Any) -> Row | None:
        rows = self.rows(sql, *values)
        return rows[0] if rows else None

    def value(self, sql: str, *values: Any) -> Any:
        row = self.row(sql, *values)
        return next(iter(row.values())) if row else None

    def exists(self, sql: str, *values: Any) -> bool:
        """Returns whether the query returns a row."""
        with self._lock, database_errors():
            return self.tables.conn.execute(sql, values).fetchone() is not None

    def write(self, sql: str, *values: Any) -> int:
        with self.transaction():
            return self.tables.conn.execute(sql, values).rowcount

    def write_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Runs a statement once per row of values, within a transaction."""
        self.tables.conn.executemany(sql, rows)

    def insert(self, table: str, row: Mapping[str, Any], conflict: str = "") -> int | None:
        names = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        with self.transaction():
            sql = f"INSERT INTO {table} ({names}) VALUES ({marks}) {conflict}"
            return self.tables.conn.execute(sql, tuple(row.values())).lastrowid


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switches the connection to WAL mode, with retries while another process does the same.

    SQLite ignores the connection's timeout here and returns BUSY immediately.
    """
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
def database_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpaceError("cannot write the database: the disk is full") from error
        raise StoreError(database_message(error)) from error
