"""The only truth of a server: runs, devices, rounds, asks, uploads, events and figures in SQLite, payloads beside them.

Tables (`schema.py`): `runs` one row a run with its contract, progress and checkpoint; `devices` who checked in;
`rounds` with their cohorts; `asks` one row for each (run, round, step number, device); `uploads` the accepted answers,
at most one an ask, whose row *is* the receipt; `events` everything refused, late, guarded or out of the ordinary;
`figures` sums and counts that devices report; `traffic` bytes. Payloads and checkpoints are blobs (`blobs.py`).

The database runs in WAL mode with `synchronous=FULL`, both asserted when it is opened: a commit is on the disk when it
returns (`database.py`). `runs.py`, `devices.py`, `asks.py`, `credentials.py` and `history.py` have the statements.
Every public method there is one transaction; `with store.transaction():` joins several. A store may be used from
several threads (one lock) and several processes (one `Store` each). `Store.in_memory()` is the same class on
`:memory:`, with blobs in a dictionary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from fleetdistill.errors import StoreError
from fleetdistill.state.durable import make_directory
from fleetdistill_server.store.asks import Asks
from fleetdistill_server.store.blobs import Blobs, disk_errors
from fleetdistill_server.store.checks import check_whole
from fleetdistill_server.store.credentials import Credentials
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.devices import Devices
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.history import History
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.store.runs import Runs
from fleetdistill_server.store.schema import migrations


class Store:
    """The parts of a store over one database. See the module's docstring.

    Attributes:
        database: The tables, for statements that no part of the store has.
        blobs: Payloads and checkpoints.
        history: Events, reported figures and bytes.
        runs: Runs and rounds.
        devices: Devices of a run.
        asks: Asks and the accepted answers.
        credentials: Tokens, certificates and revocations.
    """

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self.database = database
        self.blobs = blobs
        self.history = History(database)
        self.runs = Runs(database, self.history)
        self.devices = Devices(database)
        self.asks = Asks(database, self.history)
        self.credentials = Credentials(database)
        try:
            with database.transaction():  # of several processes that open a new store, one makes the tables
                check_whole(database.tables, blobs)
                migrations.apply(database.tables)
        except StoreError:
            database.close()
            raise

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Opens the store in a directory, makes it if need be, and brings its tables up to date.

        Raises:
            StoreError: The directory cannot be used; the database is damaged, lost, or of a later version.
        """
        with disk_errors(f"opening the store {directory}"):
            make_directory(directory)
        return cls(Database.open(directory / "store.sqlite"), FileBlobs(directory / "blobs"))

    @classmethod
    def in_memory(cls) -> Store:
        """A store that lives as long as the object, for simulation in one process."""
        return cls(Database.in_memory(), MemoryBlobs())

    def check(self) -> None:
        """Reads the whole database. Raises StoreError if it is damaged."""
        self.database.check()

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Joins several calls into one transaction; a nested one is a savepoint of its own.

        Raises:
            StoreError: The database could not be written, for instance because the disk is full.
        """
        return self.database.transaction()

    def secure_state(self, checkpoint: bytes, state: bytes) -> None:
        """Writes a state again that was deleted before any row named it; within the transaction that names it.

        Who deletes holds the same lock.
        """
        if not self.blobs.has(checkpoint):
            self.blobs.put_state(state)
