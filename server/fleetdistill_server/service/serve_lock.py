"""Which run of a store is being served: one `fleetdistill serve` at a time holds the store's `serve.lock`.

The lock ends with the process that holds it, however that ends. What the file holds is the run's name.
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
    """Takes the lock for a run; hold on to what it returns, and close it in the end.

    Raises:
        RunError: Another server holds it.
    """
    until = time.monotonic() + _WAIT_SECONDS
    with disk_errors(f"locking the store {store}"):
        while (lock := lock_file(store / _FILE)) is None:
            if time.monotonic() > until:  # somebody who only looks holds it for an instant
                raise RunError(f"another `fleetdistill serve` uses the store {store}; stop it first")
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(run)
        lock.flush()
    return lock


@contextlib.contextmanager
def kept_from_serving(store: Path) -> Iterator[str | None]:
    """Keeps every server from this store for a while; if one has it already, gives the run that it works on."""
    with disk_errors(f"locking the store {store}"):
        lock = lock_file(store / _FILE)
    if lock is None:
        yield (store / _FILE).read_text()
        return
    with lock:
        lock.truncate(0)
        yield None


def served_run(store: Path) -> str | None:
    """The run of this store that a server works on at this moment; None for none."""
    path = store / _FILE
    with disk_errors(f"looking at {path}"):
        if not path.exists():
            return None
        lock = lock_file(path)
        if lock is None:
            return path.read_text()
        lock.close()
    return None
