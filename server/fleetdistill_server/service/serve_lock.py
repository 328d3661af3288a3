"""The lock `serve.lock` of a store: held by one `fleetdistill serve` at a time; it contains which runs that serves.

The operating system releases the lock when the process that holds it exits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.link.credentials import write_private
from fleetdistill.state.file_lock import lock_file
from fleetdistill_server.config.server_config import ServerConfig, load_server_config
from fleetdistill_server.store.blobs import disk_errors

__all__ = ["is_served", "serving"]

SERVED_FILE = "served.toml"
"""The configuration of the server that holds the lock, in the store's directory."""
SERVED_STORE = "served-store"
"""The path of the store that a server of a PKI has served last, in the PKI's directory."""
_FILE = "serve.lock"
_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class Serving:
    """What the server of a store serves.

    Attributes:
        run: The only run that it serves; empty for all runs of the store.
        engines: Largest number of engines that run at once.
    """

    run: str = ""
    engines: int = 1

    def includes(self, run: str) -> bool:
        """Returns whether the server serves a run."""
        return self.run in ("", run)

    @classmethod
    def parse(cls, text: str) -> Serving:
        """Returns what a text describes, the inverse of `str`."""
        engines, _, run = text.partition(" ")
        return cls(run, int(engines) if engines.isdecimal() else 1)

    def __str__(self) -> str:
        return f"{self.engines} {self.run}"


def take(store: Path, run: str = "", engines: int = 1) -> IO[Any]:
    """Acquires the lock for a run, or for all; returns the open file, which releases the lock when it is closed.

    Raises:
        RunError: Another server holds the lock.
    """
    until = time.monotonic() + _WAIT_SECONDS
    with disk_errors(f"locking the store {store}"):
        while (lock := lock_file(store / _FILE)) is None:
            if time.monotonic() > until:  # `serving` holds the lock for an instant
                raise RunError(f"another `fleetdistill serve` uses the store {store}; stop it first")
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(str(Serving(run, engines)))
        lock.flush()
    return lock


def check_place(store: Path, lock: IO[Any]) -> None:
    """Raises RunError if the store's directory was moved, replaced or deleted since its lock was acquired."""
    try:
        if os.path.samestat((store / _FILE).stat(), os.fstat(lock.fileno())):
            return
    except FileNotFoundError:
        pass
    except OSError:  # the disk does not answer, which is another matter
        return
    raise RunError(
        f"the store {store} was moved, replaced or deleted while it was served, so the server ends. Answers since then "
        "are in the moved directory. Stop the server before you put another store in place; then start it again"
    )


@contextlib.contextmanager
def without_server(store: Path) -> Iterator[Serving | None]:
    """Prevents servers from starting on this store within the block; yields what is served, or None."""
    with disk_errors(f"locking the store {store}"):
        lock = lock_file(store / _FILE)
    if lock is None:
        yield Serving.parse((store / _FILE).read_text())
        return
    with lock:
        lock.truncate(0)
        yield None


def serving(store: Path) -> Serving | None:
    """Returns what a server serves from this store, or None if there is no server."""
    path = store / _FILE
    with disk_errors(f"reading {path}"):
        if not path.exists():
            return None
        lock = lock_file(path)
        if lock is None:
            return Serving.parse(path.read_text())
        lock.close()
    return None


def last_served(store: Path) -> ServerConfig | None:
    """Returns the settings with which the newest server of this store started; None if none has, or by hand."""
    try:
        return load_server_config(store / SERVED_FILE)
    except ConfigurationError:
        return None


def is_served(store: Path, run: str) -> bool:
    """Returns whether a server serves a run of this store."""
    served_now = serving(store)
    return served_now is not None and served_now.includes(run)


def note_served_store(pki: Path, store: Path) -> None:
    """Stores which store a server of this PKI serves, for `served_store`. Raises OSError."""
    data = f"{store.absolute()}\n".encode()
    path = pki / SERVED_STORE
    if not (path.exists() and path.read_bytes() == data):
        write_private(path, data)


def served_store(pki: Path) -> str:
    """Returns the path of the store that a server of this PKI has served last; empty if none has."""
    try:
        return (pki / SERVED_STORE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
