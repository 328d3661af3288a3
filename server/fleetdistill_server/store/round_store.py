"""The store of a simulation in one process: no fsync, payloads in memory, and one transaction for each round.

A killed process leaves the last completed round, from which the simulation resumes; a power cut may leave less.
Checkpoints are files, as in any store, so that other processes can read the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from fleetdistill.errors import DamagedError, StoreError
from fleetdistill.state.durable import make_directory
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.store import Store

__all__ = ["DeviceStates", "RoundStore"]


class DeviceStates:
    """The table `simulated_devices`, in which a simulation keeps the states of its devices.

    It is a table of the run's store, so that one transaction saves a round with its devices.

    Args:
        database: Database of the store.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def create(self) -> None:
        """Creates the table if the store has none."""
        self._db.write("CREATE TABLE IF NOT EXISTS simulated_devices (device TEXT PRIMARY KEY, state BLOB)")

    def load(self, device: str) -> dict[str, bytes]:
        """Returns the contents of a device's state by file name; empty if none is saved."""
        if not self._db.exists("SELECT 1 FROM sqlite_master WHERE name = 'simulated_devices'"):
            return {}
        data = self._db.value("SELECT state FROM simulated_devices WHERE device = ?", device)
        return {} if data is None else _unpack(data)

    def names(self) -> set[str]:
        """Returns the devices that have a saved state."""
        return set(self._db.column("SELECT device FROM simulated_devices"))

    def save(self, device: str, contents: Mapping[str, bytes]) -> None:
        """Stores the contents of a device's state by file name."""
        values = {"device": device, "state": _pack(contents)}
        self._db.insert("simulated_devices", values, "ON CONFLICT DO UPDATE SET state = excluded.state")


def _pack(contents: Mapping[str, bytes]) -> bytes:
    sizes = json.dumps({name: len(data) for name, data in contents.items()}).encode()
    return b"".join([len(sizes).to_bytes(8, "little"), sizes, *contents.values()])


def _unpack(data: bytes) -> dict[str, bytes]:
    at = 8 + int.from_bytes(data[:8], "little")
    contents = {}
    for name, size in json.loads(data[8:at]).items():
        contents[name], at = data[at : at + size], at + size
    return contents


class RoundStore(Store):
    """A store whose changes are saved by `save`, all of them or none.

    Args:
        directory: Directory of the store, created if necessary.

    Attributes:
        device_states: States of the simulation's devices.

    Raises:
        StoreError: See `Store.open`.
    """

    def __init__(self, directory: Path) -> None:
        with disk_errors(f"opening the store {directory}"):
            make_directory(directory)
        self._rounds = _RoundDatabase.open(directory / "store.sqlite")
        super().__init__(self._rounds, _RoundBlobs(directory / "blobs"))
        self._rounds.begin()
        self.device_states = DeviceStates(self.database)
        self.device_states.create()

    def save(self) -> None:
        """Saves all changes since the last call."""
        self._rounds.commit()
        self._rounds.begin()

    def close(self) -> None:
        """Discards the changes since the last `save` and closes the database."""
        self._rounds.roll_back()
        super().close()


class _RoundDatabase(SqliteDatabase):
    synchronous = ("OFF", 0)

    def begin(self) -> None:
        with self._errors():
            self.tables.conn.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        with self._errors():
            self.tables.conn.execute("COMMIT")
        committed, self._after_commit = self._after_commit, []
        for action in committed:
            action()

    def roll_back(self) -> None:
        if self._in_transaction():
            self.tables.conn.execute("ROLLBACK")


class _RoundBlobs(MemoryBlobs):
    """Payloads in memory, and checkpoints in the files of `FileBlobs`, without fsync."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        with disk_errors("creating the blob directory"):
            make_directory(directory)

    def has(self, sha256: bytes) -> bool:
        return sha256 in self._payloads or self._path(sha256).exists()

    def drop(self, sha256: bytes) -> None:
        if self._payloads.pop(sha256, None) is None:
            with disk_errors(f"deleting {sha256.hex()}"):
                self._path(sha256).unlink(missing_ok=True)

    def put_state(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).digest()
        path = self._path(sha256)
        with disk_errors("writing a checkpoint"):
            path.parent.mkdir(exist_ok=True)
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)
        return sha256

    def get_state(self, sha256: bytes) -> bytes:
        try:
            with disk_errors(f"reading checkpoint {sha256.hex()}"):
                data = self._path(sha256).read_bytes()
        except StoreError as error:
            raise DamagedError(sha256, f"checkpoint {sha256.hex()} is not in the store") from error
        if hashlib.sha256(data).digest() != sha256:
            raise DamagedError(sha256, f"checkpoint {sha256.hex()} is damaged: its SHA-256 does not match")
        return data

    def _path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self._directory / name[:2] / f"{name}.safetensors"
