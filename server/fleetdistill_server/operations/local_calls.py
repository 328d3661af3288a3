"""Writes the changes that commands make on the store's machine to the calls of operators."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import FleetDistillError, StoreError
from fleetdistill_server.store.operator_calls import BEGUN, LOCAL, Call
from fleetdistill_server.store.store import Store


@dataclass
class Outcome:
    """Result of a change.

    Attributes:
        changed: Whether anything changed.
        text: What changed; empty if the arguments say it.
    """

    changed: bool = True
    text: str = ""

    @property
    def words(self) -> str:
        """The result in words."""
        done = "done" if self.changed else "nothing to change"
        return f"{done}: {self.text}" if self.text else done


@contextlib.contextmanager
def noted(store: Store, call: str, arguments: Mapping[str, Any]) -> Iterator[Outcome]:
    """Makes the block one transaction, which also stores the call with its outcome; a failed call is stored too."""
    entry, outcome = Call(LOCAL, local_user(), call, arguments, LOCAL), Outcome()
    try:
        with store.transaction():
            yield outcome
            store.operator_calls.add(entry, outcome.words)
    except FleetDistillError as error:
        with contextlib.suppress(StoreError):  # the first error says more
            store.operator_calls.add(entry, f"failed: {error}", refused=True)
        raise


@contextlib.contextmanager
def noted_around(store: Store, call: str, arguments: Mapping[str, Any]) -> Iterator[Outcome]:
    """Stores a call as begun before a block that cannot be one transaction, and its outcome afterwards."""
    outcome = Outcome()
    number = store.operator_calls.add(Call(LOCAL, local_user(), call, arguments, LOCAL), BEGUN)
    try:
        yield outcome
    except FleetDistillError as error:
        with contextlib.suppress(StoreError):
            store.operator_calls.settle(number, f"failed: {error}", refused=True)
        raise
    store.operator_calls.settle(number, outcome.words)


def local_user() -> str:
    """Returns the name of the user who runs this process; `unknown` if the system has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
