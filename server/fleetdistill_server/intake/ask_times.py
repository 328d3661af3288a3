"""Notes when devices receive their asks, download, and upload, and writes the times every second.

The times are only shown to people. They are therefore kept in memory and written together, instead of in a durable
transaction for each: a crash loses those of the last second.
"""

from __future__ import annotations

import threading
import time

from fleetdistill_server.store.group_commit import Commit

SENT, DOWNLOAD, DOWNLOADED, UPLOAD = "sent_at", "download_at", "downloaded_at", "upload_at"
_MOST = 100_000
"""Largest number of times in memory; while the store cannot be written, later ones are not kept."""


class AskTimes:
    """Collects times of asks; thread-safe.

    Args:
        commit: Runs a job in a durable transaction.
    """

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._times: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()

    def note(self, ask: int, what: str) -> None:
        """Notes the first time of a step of an ask, one of the constants of this module."""
        with self._lock:
            if len(self._times) < _MOST:
                self._times.setdefault((ask, what), time.time())

    def write(self) -> None:
        """Writes the times to the store. Raises StoreError; the times are then kept for the next call."""
        with self._lock:
            times, self._times = self._times, {}
        if not times:
            return
        try:
            self._commit(lambda store: store.asks.record_times(times))
        except BaseException:
            with self._lock:
                self._times = {**self._times, **times}
            raise
