"""Checks that this version can use a store's database, and that the store has one."""

from __future__ import annotations

from fleetdistill.errors import StoreError
from fleetdistill.version import VERSION
from fleetdistill_server.store.blobs import Blobs
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.schema import NAMES
from fleetdistill_server.texts import counted

RECOVERY = (
    "Move the store's directory away and restore a backup with `fleetdistill restore`, "
    "or set [server] store to a new directory"
)


def is_current(database: Database) -> bool:
    """Returns whether a database has exactly the tables of this version."""
    return set(database.applied_migrations()) == set(NAMES)


def check_schema(database: Database, blobs: Blobs) -> None:
    """Checks a database before its tables are created or migrated.

    Raises:
        StoreError: A later version wrote the database, or it has no tables although the store contains payloads.
    """
    applied = database.applied_migrations()
    later = [name for name in applied if name not in NAMES]
    if later:
        raise StoreError(
            f"the store was written by a later version of fleetdistill (its schema includes {', '.join(later)}); "
            f"this is version {VERSION}. Upgrade fleetdistill, or set [server] store to another directory"
        )
    held = len(blobs.held()) if not applied else 0
    if held:
        raise StoreError(
            f"the store has {counted(held, 'payload')}, but its database {database.name} is missing or empty. "
            f"{RECOVERY}"
        )
