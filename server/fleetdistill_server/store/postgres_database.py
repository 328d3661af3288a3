"""PostgreSQL as a store's database, for several fronts and an engine on other hosts.

A commit is durable when it returns: `fsync` is verified on connecting, and `synchronous_commit` is on. If the
connection is lost, the next statement or transaction opens another one; it waits for the server until
`patience_seconds` after the loss. A transaction that loses its connection fails, like a transaction of a process that
is killed.

Only `store.py` imports this module, and only for a store in PostgreSQL, because it needs the extra `postgres`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import psycopg
import sqlite_utils

from fleetdistill.errors import StoreError
from fleetdistill_server.store.database import PATIENCE_SECONDS, Database, Row
from fleetdistill_server.store.postgres_connection import (
    Connection,
    connect,
    first_line,
    is_up,
    postgres_errors,
    store_key,
)
from fleetdistill_server.store.postgres_notices import Notices, role_key
from fleetdistill_server.store.schema import migrations

logger = logging.getLogger("fleetdistill.server.store")


# --- The time during which a database on another machine cannot be reached; logged when it begins and when it ends.

_PAUSE_SECONDS = 1.0


class Outage:
    """The current outage of a database, if any. Not thread-safe.

    Attributes:
        reason: The latest error; empty without an outage.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._since = 0.0
        self._tried = -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the database was lost; 0 without an outage."""
        return time.monotonic() - self._since if self.reason else 0.0

    def may_try(self) -> bool:
        """Returns whether to try to connect now, and counts the attempt: at most one per second."""
        now = time.monotonic()
        if now - self._tried < _PAUSE_SECONDS:
            return False
        self._tried = now
        return True

    def note(self, reason: str) -> None:
        """Records a failed attempt; the first one begins the outage."""
        if not self.reason:
            self._since = time.monotonic()
            logger.warning("the database is not available; retrying: %s", reason)
        self.reason = reason

    def end(self) -> None:
        """Ends the outage, if any."""
        if self.reason:
            logger.warning("the database is available again after %.1f s", self.seconds)
            self.reason = ""


T = TypeVar("T")
_RETRY_SECONDS = 0.1
_SHUTDOWN = (psycopg.errors.AdminShutdown, psycopg.errors.CrashShutdown, psycopg.errors.CannotConnectNow)
_PLACEHOLDER = re.compile(r"\?(\d*)")


class PostgresDatabase(Database):
    """One PostgreSQL connection, replaced when it is lost. Implements `Database`.

    Args:
        url: `postgresql://host:port/database`; see `connect`.
        patience_seconds: As in `Database`.

    Attributes:
        key: Number of the store within its database, for advisory locks and channels.

    Raises:
        StoreError: The database cannot be reached or does not write durably.
    """

    is_remote = True

    def __init__(self, url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        super().__init__()
        self.patience_seconds = patience_seconds
        self._url = url
        self._connection: Connection | None = None
        self._open: Connection | None = None  # the connection of the open transaction, even if lost
        self._closed = False
        self._outage = Outage()
        with self._errors():
            self.name = self._retrying(lambda connection: f"{connection.info.dbname} on {connection.info.host}")
            self.key = self._retrying(store_key)

    def applied_migrations(self) -> list[str]:
        known = "SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = ?"
        if not self.exists(known, MIGRATIONS):
            return []
        return [row["name"] for row in self.rows(f"SELECT name FROM {MIGRATIONS} ORDER BY position")]

    def migrate(self) -> None:
        applied = set(self.applied_migrations())
        if not applied:
            self.write(CREATE_MIGRATIONS)
        database = cast("Any", SimpleNamespace(execute=lambda sql: self.write(translate(sql))))
        for item in migrations.pending(sqlite_utils.Database(memory=True)):
            if item.name not in applied:
                item.fn(database)
                self.insert(MIGRATIONS, {"name": item.name})

    def check(self) -> None:
        """Checks that the database answers. PostgreSQL checks its own pages."""
        self.value("SELECT 1")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def notices(self, role: str, other: str, woken: Callable[[], None]) -> Notices:
        return Notices(self._url, role, other, woken)

    def is_listening(self, role: str) -> bool:
        held = (
            "SELECT 1 FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = current_database() "
            "AND l.locktype = 'advisory' AND l.granted AND l.classid = ? AND l.objid = ? LIMIT 1"
        )
        key = role_key(self.key, role)
        return self.exists(held, key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Takes the store's second lock, for deleting payloads; yields False if another process has it.

        A separate connection holds the lock, because a lost connection releases it.
        """
        with self._errors():
            connection = connect(self._url)
        try:
            with self._errors():
                row = connection.execute("SELECT pg_try_advisory_lock($1) AS free", (self.key ^ 1,)).fetchone()
            yield bool(row and row["free"])
        finally:
            # A server may notice a closed connection late; until then it would refuse the lock to the next process.
            with contextlib.suppress(psycopg.Error):  # the connection is lost, and the lock with it
                connection.execute("SELECT pg_advisory_unlock_all()")
            connection.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return postgres_errors()

    def _in_transaction(self) -> bool:
        return self._open is not None

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        self._open = self._retrying(self._begin)
        try:
            yield
            ended = self._open.execute("COMMIT").statusmessage
            if ended != "COMMIT":  # a statement had failed, and PostgreSQL rolled the transaction back
                raise StoreError("database error: the transaction was rolled back because a statement in it failed")
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                self._open.rollback()
            raise
        finally:
            self._open = None

    def _begin(self, connection: Connection) -> Connection:
        try:
            connection.execute(f"BEGIN; SELECT pg_advisory_xact_lock({self.key})")
        except psycopg.Error:
            with contextlib.suppress(psycopg.Error):
                connection.rollback()
            raise
        return connection

    def _savepoint(self) -> contextlib.AbstractContextManager[object]:
        assert self._open is not None
        return self._open.transaction()

    def _execute(self, sql: str, values: tuple[Any, ...]) -> tuple[list[Row], int]:
        text, parameters = number_parameters(sql), [_value(value) for value in values]
        if self._open is not None:
            cursor = self._open.execute(text, parameters)
        else:
            cursor = self._retrying(lambda connection: connection.execute(text, parameters))
        return (cursor.fetchall() if cursor.description is not None else []), cursor.rowcount

    def _retrying(self, work: Callable[[Connection], T]) -> T:
        """Runs work outside a transaction, on a new connection if the present one is lost."""
        if self._closed:
            raise StoreError("database error: Cannot operate on a closed database.")
        refusals = 0
        while True:
            try:
                result = work(self._connected())
            except psycopg.OperationalError as error:
                if self._connection is not None and not (self._connection.closed or isinstance(error, _SHUTDOWN)):
                    raise
                refusals = refusals + 1 if self._connection is None and is_up(self._url) else 0
                self._drop()
                self._outage.note(first_line(error))
                # at the first refusal, the server may just have started
                if refusals > 1 or self._outage.seconds >= self.patience_seconds:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                self._outage.end()
                return result

    def _connected(self) -> Connection:
        if self._connection is None:
            if self._outage.reason and self._outage.seconds >= self.patience_seconds and not self._outage.may_try():
                raise psycopg.OperationalError(self._outage.reason)  # many calls must not wait for a connection in turn
            self._connection = connect(self._url)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@lru_cache(maxsize=1024)
def number_parameters(sql: str) -> str:
    """Replaces SQLite's placeholders `?` and `?1` by PostgreSQL's `$1`."""
    numbers = count(1)
    return _PLACEHOLDER.sub(lambda found: f"${found[1] or next(numbers)}", sql)


def _value(value: Any) -> Any:
    """Returns a value as PostgreSQL stores it: integers for truth values, texts without NUL."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return int(value) if isinstance(value, bool) else value


# --- Translates the tables of `schema.py`, which are described once, from SQLite to PostgreSQL.

MIGRATIONS = "migrations"
"""Name of the table that lists the applied migrations."""
CREATE_MIGRATIONS = f"CREATE TABLE {MIGRATIONS} (position BIGINT GENERATED ALWAYS AS IDENTITY, name TEXT PRIMARY KEY)"
_WORDS = {
    # Read with a JSON function, for which PostgreSQL's TEXT would not do.
    "cohort TEXT": "cohort JSON",
    # Texts are ordered bytewise in both databases, whatever the locale of the PostgreSQL server.
    "TEXT": 'TEXT COLLATE "C"',
    "BLOB": "BYTEA",
    "INTEGER PRIMARY KEY": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",  # SQLite numbers such rows itself
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "REFERENCES asks (id)": "",  # SQLite does not enforce it
}
_WORD = re.compile(r"\b(?:" + "|".join(map(re.escape, _WORDS)) + ")")


def translate(statement: str) -> str:
    """Returns a statement of a migration in PostgreSQL's types."""
    return _WORD.sub(lambda found: _WORDS[found[0]], statement)
