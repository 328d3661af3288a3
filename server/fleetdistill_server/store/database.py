"""Interface to a store's database: statements, transactions and errors.

`sqlite_database.py` implements it for the default store, `postgres_database.py` for a server beyond one machine. The
store's statements are written once, in SQL that both databases accept, with SQLite's placeholders `?` and `?1`.

One transaction at a time changes a store: SQLite locks the file, PostgreSQL an advisory lock. A transaction therefore
reads what the previous one has written, and what it reads stays true until it ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from fleetdistill_server.logs import log_event
from fleetdistill_server.store.meter import Meter

if TYPE_CHECKING:
    from fleetdistill_server.store.postgres_notices import Notices

Row = dict[str, Any]
PATIENCE_SECONDS = 5.0
"""Time for which a call waits for a database on another machine, unless its process sets another."""


class Database(ABC):
    """A connection to a store's database. Threads share it through a lock; each process opens its own.

    Attributes:
        name: Name of the database for messages.
        patience_seconds: Longest time for which a call waits for a database on another machine, counted from its loss.
        is_remote: Whether a statement is a call over a network, which takes time and can fail.
        now: Returns the time that rows are stamped with, in seconds since 1970.
        meter: Counts what this connection commits, for a front's metrics.
    """

    name: str
    is_remote = False

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.time
        self.patience_seconds = PATIENCE_SECONDS
        self._lock = threading.RLock()
        self.meter = Meter()
        self._after_commit: list[Callable[[], None]] = []  # of the open transaction

    @abstractmethod
    def applied_migrations(self) -> list[str]:
        """Returns the names of the migrations that the database contains, in order; empty for a new database."""

    @abstractmethod
    def migrate(self) -> None:
        """Creates the tables or applies the missing migrations."""

    @abstractmethod
    def check(self) -> None:
        """Checks the database. Raises StoreError if it is damaged."""

    def compact(self) -> None:  # noqa: B027  (PostgreSQL does so itself)
        """Returns the space of deleted rows to the disk, if the database does not do so itself.

        Raises:
            StoreError: Another process changes the database for too long, or the disk is full.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""

    @abstractmethod
    def _errors(self) -> contextlib.AbstractContextManager[None]:
        """Converts the driver's errors to StoreError, and to NoSpaceError if the disk is full."""

    @abstractmethod
    def _in_transaction(self) -> bool:
        """Returns whether a transaction is open."""

    @abstractmethod
    def _outermost(self) -> contextlib.AbstractContextManager[object]:
        """Runs a transaction that excludes all other changes to the store."""

    @abstractmethod
    def _savepoint(self) -> contextlib.AbstractContextManager[object]:
        """Runs a part of a transaction that can be rolled back separately."""

    @abstractmethod
    def _execute(self, sql: str, values: tuple[Any, ...]) -> tuple[list[Row], int]:
        """Runs a statement; returns its rows and the number of rows that it changed."""

    def exclusive(self) -> contextlib.AbstractContextManager[bool] | None:
        """Returns a lock among all machines for deleting payloads, which yields whether it is held.

        None for a database of one machine, whose processes lock a file.
        """
        return None

    def notices(self, role: str, other: str, woken: Callable[[], None]) -> Notices | None:
        """Starts receiving and sending wake-ups; None for a database whose processes wake each other through pipes.

        Args:
            role: What this process is, `front` or `engine`.
            other: The role that this process wakes.
            woken: Called on another thread at each wake-up.
        """
        return None

    def is_listening(self, role: str) -> bool:
        """Returns whether a process of a role receives wake-ups from this database."""
        return False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Combines several calls into one transaction; nested transactions are savepoints.

        Raises:
            StoreError: The database could not be written, for example because the disk is full.
        """
        with self._lock, self._errors():
            before = len(self._after_commit)
            nested = self._in_transaction()
            try:
                with self._savepoint() if nested else self._outermost():
                    yield
            except BaseException:
                del self._after_commit[before:]
                raise
            if nested:
                return
            committed, self._after_commit = self._after_commit, []
        for action in committed:
            action()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Combines the statements of a block, in the open transaction or one of their own.

        Within a transaction this adds no savepoint, unlike `transaction`: if a statement fails, its owner ends it.
        """
        return contextlib.nullcontext() if self.in_transaction() else self.transaction()

    def in_transaction(self) -> bool:
        """Returns whether the calling thread is inside a transaction."""
        with self._lock:
            return self._in_transaction()

    def log(self, row: Row) -> None:
        """Logs an event after the open transaction has been committed."""
        self.after_commit(functools.partial(log_event, row))

    def after_commit(self, action: Callable[[], None]) -> None:
        """Runs an action after the open transaction has been committed; not if it is rolled back."""
        self._after_commit.append(action)

    def rows(self, sql: str, *values: Any) -> list[Row]:
        """Runs a query and returns its rows."""
        with self._lock, self._errors():
            return self._execute(sql, values)[0]

    def column(self, sql: str, *values: Any) -> list[Any]:
        """Runs a query and returns the first value of each row."""
        return [next(iter(row.values())) for row in self.rows(sql, *values)]

    def row(self, sql: str, *values: Any) -> Row | None:
        """Runs a query and returns its first row, or None."""
        rows = self.rows(sql, *values)
        return rows[0] if rows else None

    def value(self, sql: str, *values: Any) -> Any:
        """Runs a query and returns the first value of its first row, or None."""
        row = self.row(sql, *values)
        return next(iter(row.values())) if row else None

    def exists(self, sql: str, *values: Any) -> bool:
        """Returns whether a query has a row."""
        return bool(self.rows(sql, *values))

    def write(self, sql: str, *values: Any) -> int:
        """Runs a statement, in the open transaction or its own; returns the number of rows that it changed."""
        return self._change(sql, values)[1]

    def write_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Runs a statement once per row of values, in the open transaction or its own."""
        with self._lock, self._errors(), self.together():
            for values in rows:
                self._execute(sql, values)

    def insert(self, table: str, row: Mapping[str, Any], clause: str = "") -> Row:
        """Inserts a row.

        Args:
            table: Name of the table.
            row: Values by column.
            clause: End of the statement: `ON CONFLICT` or `RETURNING`.

        Returns:
            The columns of `RETURNING`; empty without it.
        """
        result = self._change(_insert_statement(table, tuple(row), clause), tuple(row.values()))[0]
        return result[0] if result else {}

    def insert_many(self, table: str, rows: Iterable[Mapping[str, Any]], clause: str = "") -> None:
        """Inserts rows with equal columns; see `insert`."""
        remaining = iter(rows)
        for first in remaining:
            statement = _insert_statement(table, tuple(first), clause)
            self.write_many(statement, (tuple(row.values()) for row in chain([first], remaining)))

    def _change(self, sql: str, values: tuple[Any, ...]) -> tuple[list[Row], int]:
        """Runs one statement in the open transaction, or in a transaction if none is open.

        A single statement needs no savepoint: the transaction around it ends if it fails.
        """
        with self._lock:
            if not self._in_transaction():
                with self.transaction():
                    return self._execute(sql, values)
            with self._errors():
                return self._execute(sql, values)


@functools.cache
def _insert_statement(table: str, columns: tuple[str, ...], clause: str) -> str:
    marks = ", ".join("?" for _ in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) {clause}"
