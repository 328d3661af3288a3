"""Whether a database is one that this version can go on with; a store that is not whole is refused with the way out."""

from __future__ import annotations

import sqlite3

from sqlite_utils import Database

from fleetdistill.errors import StoreError
from fleetdistill.version import VERSION
from fleetdistill_server.store.blobs import Blobs
from fleetdistill_server.store.schema import migrations

_KNOWN = {one.name for one in migrations.pending(Database(memory=True))}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
WAY_OUT = (
    "Move the store's directory away and restore a backup with `fleetdistill restore`, or name another "
    "[server] store to begin anew"
)


def check_whole(db: Database, blobs: Blobs) -> None:
    """Refuses a database of a later version, and one without tables beside payloads; before the tables are made.

    Raises:
        StoreError: It is such a database.
    """
    applied = [one.name for one in migrations.applied(db)]
    later = [name for name in applied if name not in _KNOWN]
    if later:
        raise StoreError(
            f"a later version of fleetdistill has written the store (its schema has {', '.join(later)}); this is "
            f"version {VERSION}: update it, or name another [server] store"
        )
    held = len(blobs.held()) if not applied else 0
    if held:
        raise StoreError(f"the store has {held} payloads, and its database store.sqlite is lost or empty. {WAY_OUT}")


def check_database(db: Database) -> None:
    """Reads the database from end to end.

    Raises:
        StoreError: It is damaged.
    """
    found = [next(iter(row.values())) for row in db.query("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise StoreError(f"the database store.sqlite is damaged ({found[0]}). {WAY_OUT}")


def in_our_words(error: sqlite3.Error) -> str:
    """What SQLite says, with the way out where the database is damaged."""
    if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGED:
        return f"the database store.sqlite is damaged ({error}). {WAY_OUT}"
    return f"the database failed: {error}"
