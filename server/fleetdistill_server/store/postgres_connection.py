"""Connections to PostgreSQL: settings that make commits durable, and errors.

Only modules that `store.py` imports lazily import this one, because it needs the extra `postgres`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg.types.string import TextLoader

from fleetdistill.errors import NoSpaceError, StoreError, StoreUnavailableError
from fleetdistill.printable import printable

Connection = psycopg.Connection[DictRow]
# A front or engine whose host is lost must not hold the store's lock: the server then ends its session.
_SESSION = (
    "SET lock_timeout = '30s'; SET idle_in_transaction_session_timeout = '300s'; "
    "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
)
_CONNECTING = {
    "application_name": "fleetdistill",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


class _WholeLoader(Loader):
    def load(self, data: Any) -> int:
        return int(bytes(data))


def connect(url: str) -> Connection:
    """Opens a connection whose commits are durable.

    The password comes from PGPASSWORD or ~/.pgpass, as libpq reads it; the URL must not contain it.
    """
    connection = psycopg.connect(
        _conninfo(url), autocommit=True, cursor_factory=psycopg.RawCursor[DictRow], row_factory=dict_row
    )
    try:
        connection.adapters.register_loader("numeric", _WholeLoader)  # sums of BIGINT
        connection.adapters.register_loader("json", TextLoader)
        _assert_durable(connection)
        connection.execute(_SESSION)
    except BaseException:
        connection.close()
        raise
    return connection


def _assert_durable(connection: Connection) -> None:
    sql = "SELECT current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit"
    row = connection.execute(sql).fetchone() or {}
    if row["fsync"] != "on":
        raise StoreError("PostgreSQL runs with fsync = off, so commits can be lost; set it to on in postgresql.conf")
    if row["synchronous_commit"] == "off":
        connection.execute("SET synchronous_commit = on")


def store_key(connection: Connection) -> int:
    """Returns the number of the connection's store: a hash of its schema, even."""
    row = connection.execute("SELECT hashtextextended('fleetdistill.' || current_schema(), 0) AS key").fetchone()
    if row is None or row["key"] is None:
        raise StoreError("the database has no schema for the store; create the schema in the URL's search_path")
    return int(row["key"]) & ~1


@contextlib.contextmanager
def postgres_errors() -> Iterator[None]:
    """Converts psycopg's errors to StoreError.

    Raises:
        NoSpaceError: The server's disk is full.
        StoreUnavailableError: The server cannot be reached, or another process holds the write lock for too long.
    """
    try:
        yield
    except psycopg.errors.DiskFull as error:
        raise NoSpaceError("cannot write the database: the disk of the PostgreSQL server is full") from error
    except psycopg.OperationalError as error:
        raise StoreUnavailableError(f"the database is not available: {first_line(error)}") from error
    except psycopg.Error as error:
        raise StoreError(f"database error: {first_line(error)}") from error


def is_up(url: str) -> bool:
    """Returns whether the server accepts connections, so that a failed one has another cause."""
    return bool(pq.PGconn.ping(_conninfo(url).encode()) == pq.Ping.OK)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; further lines repeat the statement."""
    return printable(str(error).partition("\n")[0]) or type(error).__name__


def _conninfo(url: str) -> str:
    return str(make_conninfo("", **{**_CONNECTING, **conninfo_to_dict(url)}))
