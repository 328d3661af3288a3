"""Checks that this version can use a store's database, and that the database is complete and undamaged."""

from __future__ import annotations

import sqlite3

from sqlite_utils import Database

from fleetdistill.errors import StoreError
from fleetdistill.version import VERSION
from fleetdistill_server.store.blobs import Blobs
from fleetdistill_server.store.schema import migrations

_KNOWN = {one.name for one in migrations.pending(Database(memory=True))}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
RECOVERY = (
    "Move the store's directory away and restore a backup with `fleetdistill restore`, "
    "or set [server] store to a new directory"
)


def check_schema(db: Database, blobs: Blobs) -> None:
    """Checks a database before its tables are created or migrated.

    Raises:
        StoreError: A later version wrote the database, or it has no tables although the store contains payloads.
    """
    applied = [one.name for one in migrations.applied(db)]
    later = [name for name in applied if name not in _KNOWN]
    if later:
        raise StoreError(
            f"the store was written by a later version of fleetdistill (its schema includes {', '.join(later)}); "
            f"this is version {VERSION}. Upgrade fleetdistill, or set [server] store to another directory"
        )
    held = len(blobs.held()) if not applied else 0
    if held:
        raise StoreError(
            f"the store has {held} payloads, but its database store.sqlite is missing or empty. {RECOVERY}"
        )


def check_database(db: Database) -> None:
    """Reads the whole database.

    Raises:
        StoreError: The database is damaged.
    """
    found = [next(iter(row.values())) for row in db.query("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise StoreError(f"the database store.sqlite is damaged ({found[0]}). {RECOVERY}")


def database_message(error: sqlite3.Error) -> str:
    """Returns the message for a SQLite error, including how to recover if the database is damaged."""
    if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGED:
        return f"the database store.sqlite is damaged ({error}). {RECOVERY}"
    return f"database error: {error}"
