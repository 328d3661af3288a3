"""Counts deletions of payloads, so that a receipt need not look for its payload under the write lock.

The count is odd while a deletion is announced and even otherwise. A deletion is announced in a transaction that is
committed before the first file is deleted. The transaction that deletes files makes the count even again. A process
that crashes while it deletes therefore leaves an odd count, even though its transaction is rolled back.

A payload that was stored after an even count was read exists as long as the count is unchanged.
"""

from __future__ import annotations

from fleetdistill_server.store.database import Database


class Deletions:
    """Reads and writes the table `deletions`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def count(self) -> int:
        """Returns the count. Read it before storing a payload, then pass it to `none_since`."""
        return int(self._db.value("SELECT count FROM deletions"))

    def none_since(self, count: int) -> bool:
        """Returns whether nothing was deleted since `count` was read.

        Call this in the transaction that refers to the payload. False also if a deletion was announced when `count`
        was read.
        """
        return count % 2 == 0 and self.count() == count

    def announce(self) -> None:
        """Announces a deletion. The announcement must be committed before the deletion begins."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 0")

    def announced(self) -> bool:
        """Returns whether a deletion is announced."""
        return self.count() % 2 == 1

    def end(self) -> None:
        """Ends an announced deletion, if any. Call this in the transaction that deletes files, or instead of it."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 1")
