"""Looks up revocations without waiting, because the event loop does so for each call and message.

In SQLite, a lookup is one index access, which does not wait for writers in WAL mode. In a database on another machine,
it is a call over the network. A thread then reads all revocations every second, so that a new one takes effect within
about a second at every front. While the database is not available, the last known ones apply.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Protocol

from fleetdistill.errors import StoreError
from fleetdistill_server.logs import Interruption
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.front")
_REFRESH_SECONDS = 1.0


class Revocations(Protocol):
    """Answers whether somebody is revoked."""

    def is_revoked(self, holder: str, certificate: str) -> bool:
        """Returns whether a holder (`device:ID`) or its certificate (`serial:HEX`) is revoked."""


class _Snapshot:
    """All revocations as of the last `refresh`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._subjects: frozenset[str] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        self._subjects = frozenset(revocation.subject for revocation in self._store.credentials.revocations())

    def is_revoked(self, holder: str, certificate: str) -> bool:
        return holder in self._subjects or certificate in self._subjects


@contextlib.contextmanager
def open_revocations(store: Store) -> Iterator[Revocations]:
    """Yields the revocations in a store that only the event loop uses."""
    if not store.database.is_remote:
        yield store.credentials
        return
    snapshot = _Snapshot(store)
    ended = threading.Event()
    thread = threading.Thread(target=_refresh, args=(snapshot, ended), name="revocations", daemon=True)
    thread.start()
    try:
        yield snapshot
    finally:
        ended.set()


def _refresh(snapshot: _Snapshot, ended: threading.Event) -> None:
    text = "the revocations cannot be read; the last known ones apply: %s"
    away = Interruption(logger, text, "the revocations can be read again")
    while not ended.wait(_REFRESH_SECONDS):
        try:
            snapshot.refresh()
            away.work()
        except StoreError as error:
            if not ended.is_set():
                away.fail(error)
