"""The lock `serve.lock` of a store: held by one `fleetdistill serve` at a time; it contains the name of the run.

The operating system releases the lock when the process that holds it exits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fleetdistill.errors import RunError
from fleetdistill.state.file_lock import lock_file
from fleetdistill_server.store.blobs import disk_errors

_FILE = "serve.lock"
_WAIT_SECONDS = 1.0


def take(store: Path, run: str) -> IO[Any]:
    """Acquires the lock for a run and returns the open file; closing the file releases the lock.

    Raises:
        RunError: Another server holds the lock.
    """
    until = time.monotonic() + _WAIT_SECONDS
    with disk_errors(f"locking the store {store}"):
        while (lock := lock_file(store / _FILE)) is None:
            if time.monotonic() > until:  # `served_run` holds the lock for an instant
                raise RunError(f"another `fleetdistill serve` uses the store {store}; stop it first")
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(run)
        lock.flush()
    return lock


@contextlib.contextmanager
def without_server(store: Path) -> Iterator[str | None]:
    """Prevents servers from starting on this store within the block; yields the run that is served, or None."""
    with disk_errors(f"locking the store {store}"):
        lock = lock_file(store / _FILE)
    if lock is None:
        yield (store / _FILE).read_text()
        return
    with lock:
        lock.truncate(0)
        yield None


def served_run(store: Path) -> str | None:
    """Returns the run of this store that a server is serving, or None."""
    path = store / _FILE
    with disk_errors(f"reading {path}"):
        if not path.exists():
            return None
        lock = lock_file(path)
        if lock is None:
            return path.read_text()
        lock.close()
    return None
