"""The SQLite database of a store, for tests of what only SQLite does."""

from __future__ import annotations

from pathlib import Path

import sqlite_utils

from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.store import Store


def tables_of(store: Store) -> sqlite_utils.Database:
    """The connection of a store in SQLite."""
    assert isinstance(store.database, SqliteDatabase)
    return store.database.tables


def directory_of(store: Store) -> Path:
    """The directory of a store on disk."""
    row, *_ = tables_of(store).query("PRAGMA database_list")  # the first is the main one
    return Path(row["file"]).parent
