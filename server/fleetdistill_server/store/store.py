"""The server's only durable state: a SQLite database with payload files beside it.

The main tables (`schema.py`) are:

- `runs`: one row per run, with its contract, progress and checkpoint.
- `devices`: the devices that have checked in to each run.
- `rounds`: the rounds and their cohorts.
- `asks`: one row per run, round, step number and device.
- `uploads`: accepted answers, at most one per ask; the row serves as the receipt.
- `events`: refusals, late answers, fired guards and other unusual events.
- `deletions`: a count of deletions of payloads.
- `figures`: sums and counts that devices reported.
- `traffic`: byte counts.

Payloads and checkpoints are blobs (`blobs.py`).

Runs, devices, rounds, asks, uploads and events leave the store as frozen dataclasses (`records.py`).

The database runs in WAL mode with `synchronous=FULL`, and both are verified on opening: a commit is durable when it
returns (`database.py`). The SQL statements are in `runs.py`, `devices.py`, `asks.py`, `credentials.py` and
`history.py`. Each public method of these modules is one transaction; `with store.transaction():` combines several. A
store may be used by several threads (one lock) and several processes (one `Store` each). `Store.in_memory()` creates a
store with the database `:memory:` and blobs in a dictionary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from fleetdistill.errors import ConfigurationError, StoreError
from fleetdistill.state.durable import make_directory
from fleetdistill_server.store.asks import Asks, Deletions
from fleetdistill_server.store.blobs import Blobs, disk_errors
from fleetdistill_server.store.checks import check_schema, is_current
from fleetdistill_server.store.clock import Clock
from fleetdistill_server.store.credentials import Credentials
from fleetdistill_server.store.database import PATIENCE_SECONDS, Database
from fleetdistill_server.store.devices import Devices
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.history import History
from fleetdistill_server.store.location import SQLITE, Location, read_location
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.store.operator_calls import OperatorCalls
from fleetdistill_server.store.run_control import RunControl
from fleetdistill_server.store.runs import Runs
from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.summaries import Summaries

__all__ = ["Store"]

_LATEST_TIME = """
SELECT max(at) FROM (
SELECT max(started_at) AS at FROM rounds UNION ALL SELECT max(ended_at) FROM rounds
UNION ALL SELECT max(received_at) FROM uploads UNION ALL SELECT max(at) FROM events
UNION ALL SELECT max(last_seen) FROM devices) AS times
"""


class Store:
    """A store's tables and blobs, grouped by subject.

    Attributes:
        database: Database connection, for statements that the groups below do not provide.
        blobs: Payloads and checkpoints.
        history: Events, reported figures and byte counts.
        runs: Runs and rounds.
        run_control: How operators control runs: configuration, start, pause, and the order of starts.
        devices: Devices of each run.
        asks: Asks and accepted answers.
        credentials: Tokens, certificates and revocations.
        deletions: Count of deletions of payloads.
        operator_calls: Calls of operators.
        summaries: Sums over rounds and devices, for people.
    """

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self.database = database
        self.blobs = blobs
        self.history = History(database)
        self.asks = Asks(database, self.history)
        self.runs = Runs(database, self.history, self.asks)
        self.run_control = RunControl(database, self.history)
        self.devices = Devices(database)
        self.credentials = Credentials(database)
        self.deletions = Deletions(database)
        self.operator_calls = OperatorCalls(database)
        self.summaries = Summaries(database)
        try:
            if not is_current(database):  # a reader need not wait for a process that is writing
                _create_tables(database, blobs)
        except StoreError:
            database.close()
            raise

    @classmethod
    def open(
        cls, directory: Path, location: Location | None = None, patience_seconds: float = PATIENCE_SECONDS
    ) -> Store:
        """Opens the store in a directory; creates it if necessary and migrates its tables.

        Args:
            directory: The store's directory.
            location: Where its rows and payloads are; None for what `set_location` stored in the directory.
            patience_seconds: Time for which each call, also this one, waits for a database on another machine.

        Raises:
            ConfigurationError: An extra that the location needs is not installed.
            StoreError: The directory cannot be used, or the database is damaged, missing, or from a later version.
        """
        with disk_errors(f"opening the store {directory}"):
            make_directory(directory)
        place = location or read_location(directory)
        database = _open_database(directory, place, patience_seconds)
        try:
            return cls(database, _open_blobs(directory, place, database))
        except BaseException:
            database.close()
            raise

    @classmethod
    def in_memory(cls) -> Store:
        """Returns a store that exists only in memory, for simulation in one process."""
        return cls(SqliteDatabase.in_memory(), MemoryBlobs())

    def use_clock(self, clock: Clock) -> None:
        """Uses a clock for deadlines and for the times in all rows; for simulated time."""
        self.asks.clock, self.database.now = clock, clock.now

    def check(self) -> None:
        """Reads the whole database. Raises StoreError if it is damaged."""
        self.database.check()

    def latest_time(self) -> float | None:
        """Returns the latest time of a round, upload, event or device, in seconds since 1970; None if there is none."""
        at = self.database.value(_LATEST_TIME)
        return None if at is None else float(at)

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Combines several calls into one transaction; nested transactions are savepoints.

        Raises:
            StoreError: The database could not be written, for example because the disk is full.
        """
        return self.database.transaction()

    def secure_state(self, checkpoint: bytes, state: bytes) -> None:
        """Writes a checkpoint again if it was deleted before a row referred to it.

        Call this within the transaction that stores the reference, because deletion takes the same lock.
        """
        if not self.blobs.has(checkpoint):
            self.blobs.put_state(state)


class _Undo(Exception):
    """Rolls back the transaction of a trial."""


@contextlib.contextmanager
def open_for_trial(directory: Path, location: Location) -> Iterator[Store]:
    """Opens a store that exists, for checks. If its tables are missing or old, they are migrated in the block only.

    Everything that the block does to such a store is rolled back with the migration. Other processes that write to it
    wait meanwhile.

    Raises:
        ConfigurationError: An extra that the location needs is not installed.
        StoreError: As `Store.open`.
    """
    with contextlib.closing(_open_database(directory, location)) as database:
        blobs = _open_blobs(directory, location, database)
        if is_current(database):
            yield Store(database, blobs)
            return
        check_schema(database, blobs)
        with contextlib.suppress(_Undo), database.transaction():
            database.migrate()
            yield Store(database, blobs)
            raise _Undo


def open_for_reading(directory: Path, location: Location) -> tuple[Database, Blobs]:
    """Opens the database and the payloads of a store that exists, without creating or migrating tables.

    Raises:
        ConfigurationError: An extra that the location needs is not installed.
        StoreError: The database cannot be reached, or is no database.
    """
    if location.database:
        database = _open_database(directory, location)
    else:
        database = SqliteDatabase.open_for_reading(directory / SQLITE)
    return database, _open_blobs(directory, location, database)


def _create_tables(database: Database, blobs: Blobs) -> None:
    """Creates or migrates the tables, unless another process does so while this one waits for the lock.

    The other process may not release the lock: a simulation's transaction lasts for a round.
    """
    try:
        with database.transaction():
            check_schema(database, blobs)
            database.migrate()
    except StoreError:
        if not is_current(database):
            raise


def _open_database(directory: Path, location: Location, patience_seconds: float = PATIENCE_SECONDS) -> Database:
    if not location.database:
        return SqliteDatabase.open(directory / SQLITE)
    try:
        from fleetdistill_server.store.postgres_database import PostgresDatabase
    except ImportError as error:
        text = "[server] database needs psycopg; install it with: pip install 'fleetdistill[postgres]'"
        raise ConfigurationError(text) from error
    return PostgresDatabase(location.database, patience_seconds)


def _open_blobs(directory: Path, location: Location, database: Database) -> Blobs:
    if not location.blobs:
        return FileBlobs(directory / "blobs")
    try:
        from fleetdistill_server.store.object_blobs import ObjectBlobs
    except ImportError as error:
        text = "[server] blobs needs s3fs; install it with: pip install 'fleetdistill[s3]'"
        raise ConfigurationError(text) from error
    return ObjectBlobs(directory / "blobs", location.blobs, database.exclusive)
