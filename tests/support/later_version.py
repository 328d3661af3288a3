"""A later version of the server: one that adds a migration to the store's."""

from __future__ import annotations

import copy
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fleetdistill_server
from fleetdistill_server.store.schema import NAMES, migrations

LATER = "m900_later"
_CODE = f"""
@migrations()
def {LATER}(db):
    db.execute("ALTER TABLE runs ADD COLUMN later INTEGER NOT NULL DEFAULT 7")
    db.execute("CREATE TABLE later_sums (run TEXT PRIMARY KEY, rounds INTEGER NOT NULL)")
    db.execute("INSERT INTO later_sums SELECT run, count(*) FROM rounds GROUP BY run")
    db.execute("CREATE INDEX later_rounds ON rounds (run, status)")


NAMES.append("{LATER}")
"""


@contextmanager
def later_version() -> Iterator[None]:
    """Makes this process one of the later version, in the block."""
    before = copy.deepcopy(vars(migrations))
    exec(_CODE, {"migrations": migrations, "NAMES": NAMES})
    try:
        yield
    finally:
        NAMES.remove(LATER)
        vars(migrations).update(before)


def install_later_version(directory: Path) -> Path:
    """Copies the server's package as the later version; returns the directory, for PYTHONPATH."""
    package = Path(str(fleetdistill_server.__file__)).parent
    shutil.copytree(package, directory / package.name)
    with (directory / package.name / "store/schema.py").open("a") as file:
        file.write(_CODE)
    return directory


def schema(directory: Path) -> dict[str, str]:
    """Statements that created the tables, indexes and views of a store, by type and name."""
    with closing(sqlite3.connect(directory / "store.sqlite")) as database:
        return dict(database.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def rows(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table but for the migrations' own."""
    with closing(sqlite3.connect(directory / "store.sqlite")) as database:
        database.row_factory = sqlite3.Row
        names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        mine = [name for name in names if not name.startswith(("sqlite_", "_sqlite"))]
        return {name: [dict(row) for row in database.execute(f"SELECT * FROM {name}")] for name in mine}
