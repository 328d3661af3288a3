"""Wake-ups among the processes of a store in PostgreSQL: LISTEN and NOTIFY, without data.

A lost wake-up costs time but not correctness, because waiting processes also poll every second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg

from fleetdistill.errors import StoreError
from fleetdistill_server.store.postgres_connection import Connection, connect, store_key

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 0.5


class Notices:
    """Receives and sends the wake-ups of one process, on two threads with a connection each.

    While it listens, the process holds a shared advisory lock, by which other processes see it (`is_listening`).

    Args:
        url: URL of the database.
        role: What this process is, `front` or `engine`: it is woken when somebody notifies this role.
        other: The role that `send` wakes.
        woken: Called on another thread, also whenever a wake-up may have been missed.
    """

    def __init__(self, url: str, role: str, other: str, woken: Callable[[], None]) -> None:
        self._url = url
        self._other = other
        self._woken = woken
        self._due = threading.Event()
        self._closed = False
        for work, name in ((lambda one: self._listen(one, role), "listen"), (self._notify, "notify")):
            threading.Thread(target=self._repeat, args=(work,), name=name, daemon=True).start()

    def send(self) -> None:
        """Wakes all processes of the other role; returns immediately."""
        self._due.set()

    def close(self) -> None:
        """Ends both threads within a second."""
        self._closed = True
        self._due.set()

    def _repeat(self, work: Callable[[Connection], None]) -> None:
        """Runs work on a connection, and on another one after an error, until closed."""
        while not self._closed:
            try:
                with connect(self._url) as connection:
                    work(connection)
            except (psycopg.Error, StoreError):
                time.sleep(_RETRY_SECONDS)

    def _listen(self, connection: Connection, role: str) -> None:
        key = store_key(connection)
        connection.execute("SELECT pg_advisory_lock_shared($1)", (role_key(key, role),))
        connection.execute(f"LISTEN {_channel(key, role)}")
        self._woken()
        while not self._closed:
            for _ in connection.notifies(timeout=_LOOK_SECONDS):
                self._woken()

    def _notify(self, connection: Connection) -> None:
        channel = _channel(store_key(connection), self._other)
        while self._due.wait() and not self._closed:
            self._due.clear()
            connection.execute(f"NOTIFY {channel}")


def role_key(key: int, role: str) -> int:
    """Returns the number of the advisory lock that the processes of a role share."""
    return key ^ {"front": 2, "engine": 4}[role]


def _channel(key: int, role: str) -> str:
    return f"fleetdistill_{key & (1 << 64) - 1:x}_{role}"
