"""Counts deletions of payloads, so that a receipt need not look for its payload under the write lock.

The count is odd while a deletion is announced and even otherwise. A deletion is announced in a transaction that is
committed before the first file is deleted. The transaction that deletes files makes the count even again. A process
that crashes while it deletes therefore leaves an odd count, even though its transaction is rolled back.

A payload that was stored after an even count was read exists as long as the count is unchanged.
"""

from __future__ import annotations

from fleetdistill_server.store.database import Database

COUNT = "(SELECT count FROM deletions)"
"""The count, as a part of a statement that reads what belongs to it."""


def is_unchanged(before: int, now: int) -> bool:
    """Returns whether nothing was deleted between two counts; False also if a deletion was announced at the first.

    `before` was read before a payload was stored, `now` in the transaction that refers to the payload.
    """
    return before % 2 == 0 and now == before


class Deletions:
    """Reads and writes the table `deletions`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def announce(self) -> None:
        """Announces a deletion. The announcement must be committed before the deletion begins."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 0")

    def announced(self) -> bool:
        """Returns whether a deletion is announced."""
        return int(self._db.value(f"SELECT {COUNT}")) % 2 == 1

    def end(self) -> None:
        """Ends an announced deletion, if any. Call this in the transaction that deletes files, or instead of it."""
        self._db.write("UPDATE deletions SET count = count + 1 WHERE count % 2 = 1")
