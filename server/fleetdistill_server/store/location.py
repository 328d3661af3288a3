"""Where a store keeps its rows and payloads: the file `location.toml` in its directory.

A store without this file is a SQLite database and files in its directory. The file contains no secrets: PostgreSQL's
password and the object store's keys come from the environment. Only its owner can read it.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from fleetdistill.errors import ConfigurationError, StoreError
from fleetdistill.link.credentials import write_private
from fleetdistill.state.durable import make_directory
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.store.blobs import disk_errors

__all__ = ["SQLITE", "has_store"]

SQLITE = "store.sqlite"
"""Name of the SQLite database's file in the store's directory."""
_FILE = "location.toml"


@dataclass(frozen=True)
class Location:
    """The `[server]` settings that say where a store is.

    Attributes:
        database: `postgresql://host:port/database`; empty for SQLite in the store's directory.
        blobs: `s3://bucket/prefix`; empty for files in the store's directory.
    """

    database: str = ""
    blobs: str = ""

    @classmethod
    def of(cls, server: ServerSection) -> Location:
        """Returns the location that a run.toml sets."""
        return cls(server.database, server.blobs)


def has_store(directory: Path) -> bool:
    """Returns whether a server has created a store in a directory."""
    return (directory / SQLITE).exists() or (directory / _FILE).exists()


def read_location(directory: Path) -> Location:
    """Returns the location of the store in a directory. Raises StoreError if its file cannot be read."""
    path = directory / _FILE
    with disk_errors(f"reading {path}"):
        if not path.exists():
            return Location()
        try:
            return Location(**tomllib.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} cannot be read: {error}; start `fleetdistill serve` again") from error


def set_location(directory: Path, location: Location) -> None:
    """Stores the location of a store before the store is opened.

    Raises:
        ConfigurationError: The directory has a store in another kind of database.
    """
    if location != read_location(directory):
        _check_kind(directory, location)
        with disk_errors(f"writing {directory / _FILE}"):
            make_directory(directory)
            write_private(directory / _FILE, tomli_w.dumps(asdict(location)).encode())


def _check_kind(directory: Path, location: Location) -> None:
    if not has_store(directory):
        return
    known = read_location(directory)
    for setting in ("database", "blobs"):
        before, now = getattr(known, setting), getattr(location, setting)
        if bool(before) != bool(now):
            raise ConfigurationError(
                f"[server] {setting} is {now!r}, but the store {directory} was created with {before!r}; "
                "set the old value, or another [server] store"
            )
