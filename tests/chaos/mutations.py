"""Faults of the server that the checker must find, switched on in a test's own processes only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

RECEIPT_BEFORE_COMMIT = "receipt before commit"
BROKEN_IDEMPOTENCY = "broken idempotency"
_GAP_SECONDS = 0.1


def _settle_before_commit() -> None:
    """The front answers while the transaction is still open: what a kill then takes back was acknowledged."""
    from fleetdistill_server.store.group_commit import CommitThread

    def run(self: Any, jobs: list[Any]) -> None:
        with self._store.transaction():
            for settle in [self._one(job, future) for job, future in jobs]:
                settle()
            time.sleep(_GAP_SECONDS)

    _replace(CommitThread, "_run", run)


def _forget_what_was_accepted() -> None:
    """The front takes every upload for the first answer to its ask, and the store keeps them all."""
    from fleetdistill_server.intake.uploads import Uploads
    from fleetdistill_server.store.asks import Asks
    from fleetdistill_server.store.states import AskStatus

    asked, accept = Uploads._asked, Asks.accept_upload

    def open_ask(self: Any, *about: Any) -> Any:
        return replace(asked(self, *about), status=AskStatus.OPEN)

    def accept_again(self: Any, ask: int, *about: Any) -> Any:
        for index in self._db.rows("PRAGMA index_list(uploads)"):
            if index["unique"] and index["origin"] == "c":  # what would refuse a second answer
                self._db.write(f"DROP INDEX {index['name']}")
        self._db.write("UPDATE asks SET status = 'open' WHERE id = ?", ask)
        return accept(self, ask, *about)

    _replace(Uploads, "_asked", open_ask)
    _replace(Asks, "accept_upload", accept_again)
    _replace(Asks, "upload_of", lambda self, ask: None)


def _replace(owner: type, name: str, other: Callable[..., Any]) -> None:
    assert callable(getattr(owner, name))  # a mutation of something that is gone would break nothing
    setattr(owner, name, other)


MUTATIONS: Mapping[str, Mapping[str, Callable[[], None]]] = {
    RECEIPT_BEFORE_COMMIT: {"front": _settle_before_commit},
    BROKEN_IDEMPOTENCY: {"front": _forget_what_was_accepted},
}
"""By name and process what to do there at the start."""
