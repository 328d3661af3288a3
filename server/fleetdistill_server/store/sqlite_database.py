"""The default database of a store: a SQLite file, or memory.

The database runs in WAL mode with `synchronous=FULL`, and both are verified on opening: a commit is durable when it
returns.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlite_utils

from fleetdistill.errors import NoSpaceError, StoreError, StoreUnavailableError
from fleetdistill_server.store.checks import RECOVERY
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.schema import migrations

_BUSY_SECONDS = 30
_PAGES_AT_ONCE = 1000
"""Pages of 4 kB that `compact` moves in one transaction."""
_CLOSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class SqliteDatabase(Database):
    """One SQLite connection. Implements `Database`.

    Attributes:
        tables: The connection as a `sqlite_utils.Database`.
    """

    name = "store.sqlite"
    synchronous = ("FULL", 2)
    """SQLite's setting of this name and its number: FULL makes each commit durable."""

    def __init__(self, connection: sqlite3.Connection, journal_mode: str) -> None:
        super().__init__()
        self.tables = sqlite_utils.Database(connection)
        try:
            with database_errors():
                self._assert_durable(journal_mode)
        except StoreError:
            connection.close()
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a database file, or creates it. Raises StoreError if it cannot be used."""
        with _opening(path):
            connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            _use_wal(connection)
        return cls(connection, "wal")

    @classmethod
    def open_for_reading(cls, path: Path) -> Self:
        """Opens a database file that exists, and never writes to it; also beside processes that write.

        Raises:
            StoreError: The file cannot be read, or is no database.
        """
        # Without a log there is no writer, and SQLite need not create the log to read.
        unused = not path.with_name(f"{path.name}-wal").exists()
        address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if unused else ''}"
        with _opening(path):
            connection = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
            mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
        return cls(connection, mode)

    @classmethod
    def in_memory(cls) -> SqliteDatabase:
        """Returns a database that exists only in memory."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        return cls(connection, "memory")

    def _assert_durable(self, journal_mode: str) -> None:
        name, number = self.synchronous
        self.tables.execute(f"PRAGMA synchronous={name}")
        self.tables.execute("PRAGMA fullfsync=ON")  # required on macOS to flush the drive's cache
        result = (self.value("PRAGMA journal_mode"), self.value("PRAGMA synchronous"))
        if result != (journal_mode, number):
            raise StoreError(
                f"the database opened with (journal_mode, synchronous) = {result}, "
                f"expected ({journal_mode!r}, {number}); put the store on a local file system"
            )

    def applied_migrations(self) -> list[str]:
        with self._lock, database_errors():
            return [item.name for item in migrations.applied(self.tables)]

    def migrate(self) -> None:
        with self._lock, database_errors():
            migrations.apply(self.tables)

    def check(self) -> None:
        """Reads the whole database. Raises StoreError if it is damaged."""
        with self._lock, database_errors():
            result = [next(iter(row.values())) for row in self.tables.query("PRAGMA quick_check(1)")]
        if result != ["ok"]:
            raise StoreError(f"the database store.sqlite is damaged ({' '.join(str(result[0]).split())}). {RECOVERY}")

    def compact(self) -> None:
        """Cuts the pages of deleted rows off the file, in steps between which other processes can write."""
        left = int(self.value("PRAGMA freelist_count"))
        while left:
            with self._lock, database_errors():
                self.tables.conn.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})").fetchall()
                self.tables.conn.execute("PRAGMA wal_checkpoint(PASSIVE)")
            before, left = left, int(self.value("PRAGMA freelist_count"))
            if left >= before:  # others delete as fast
                break
        with self._lock, database_errors():
            self.tables.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock:
            self.tables.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _ERRORS

    def _in_transaction(self) -> bool:
        return bool(self.tables.conn.in_transaction)

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        self.tables.conn.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.tables.conn.execute("COMMIT")
        except BaseException:
            self.tables.rollback()
            raise

    def _savepoint(self) -> contextlib.AbstractContextManager[None]:
        return _Savepoint(self.tables.conn)

    def _execute(self, sql: str, values: tuple[Any, ...]) -> tuple[list[Row], int]:
        cursor = self.tables.conn.execute(sql, values)
        if cursor.description is None:
            return [], cursor.rowcount
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor], cursor.rowcount

    def exists(self, sql: str, *values: Any) -> bool:
        with self._lock, self._errors():
            return self.tables.conn.execute(sql, values).fetchone() is not None  # a front asks this for every message

    def column(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, self._errors():
            return [row[0] for row in self.tables.conn.execute(sql, values)]  # a fleet has 100,000: no mapping for each

    def write_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with self._lock, self._errors(), self.together():
            self.tables.conn.executemany(sql, rows)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switches the connection to WAL mode, with retries while another process does the same.

    SQLite ignores the connection's timeout here and returns BUSY immediately.
    """
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            if not connection.execute("PRAGMA page_count").fetchone()[0]:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # for `compact`; only a new file can have it
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


class _Savepoint:
    """Rolls a part of a transaction back if it fails.

    All have one name, which SQLite looks up from the innermost on: a new name for each would make two statements that
    are parsed and never used again, as `sqlite_utils.Database.atomic` does.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("SAVEPOINT part")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if not self._connection.in_transaction:  # an error such as a full disk can end the whole transaction
                return
            self._connection.execute("ROLLBACK TO part")
        self._connection.execute("RELEASE part")


class _Errors:
    """Converts SQLite's errors to StoreError, NoSpaceError if the disk is full, StoreUnavailableError if it is locked.

    One object serves all statements: making a context manager for each takes longer than the shortest of them.
    """

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, sqlite3.Error):
            raise _store_error(error) from error


_ERRORS = _Errors()


def database_errors() -> contextlib.AbstractContextManager[None]:
    """Converts SQLite's errors in a block to StoreError.

    Raises:
        NoSpaceError: The disk is full.
        StoreUnavailableError: Another process holds the write lock for too long.
    """
    return _ERRORS


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Converts SQLite's errors as `database_errors`; of a file that cannot be opened, with its path and the cause."""
    try:
        with database_errors():
            yield
    except StoreError as error:
        if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF not in _CLOSED:
            raise
        try:
            with path.open("r+b"):
                cause = f"the directory {path.parent} cannot be written"
        except OSError as refusal:
            cause = refusal.strerror or str(refusal)
        text = f"cannot open the database {path}: {cause}; run this as the user of the server"
        raise StoreError(text) from error


def _store_error(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_FULL:
        return NoSpaceError("cannot write the database: the disk is full")
    if (code & 0xFF) in _DAMAGED:
        return StoreError(f"the database store.sqlite is damaged ({error}). {RECOVERY}")
    if (code & 0xFF) == sqlite3.SQLITE_BUSY:
        text = f"another process has held the write lock for {_BUSY_SECONDS} s; it may be stopped or the disk too slow"
        return StoreUnavailableError(f"the database is not available: {text}")
    return StoreError(f"database error: {error}")
