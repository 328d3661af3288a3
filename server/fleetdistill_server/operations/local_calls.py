"""Writes the changes that commands make on the store's machine to the calls of operators."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator, Mapping
from typing import Any

from fleetdistill.errors import FleetDistillError, StoreError
from fleetdistill_server.store.operator_calls import LOCAL, Call, Outcome
from fleetdistill_server.store.store import Store


@contextlib.contextmanager
def noted(store: Store, call: str, arguments: Mapping[str, Any]) -> Iterator[Outcome]:
    """Makes the block one transaction, which also stores the call with its outcome; a failed call is stored too."""
    entry = local_call(call, arguments)
    try:
        with store.operator_calls.with_change(entry) as outcome:
            yield outcome
    except FleetDistillError as error:
        note_failure(store, entry, error)
        raise


@contextlib.contextmanager
def noted_around(store: Store, call: str, arguments: Mapping[str, Any]) -> Iterator[Outcome]:
    """Stores a call as begun before a block that cannot be one transaction, and its outcome afterwards."""
    outcome = Outcome()
    number = store.operator_calls.begin(local_call(call, arguments))
    try:
        yield outcome
    except FleetDistillError as error:
        with contextlib.suppress(StoreError):
            store.operator_calls.settle(number, f"failed: {error}", refused=True)
        raise
    store.operator_calls.settle(number, outcome.words)


def note_failure(store: Store, call: Call, error: FleetDistillError) -> None:
    """Stores a failed call if the store can be written; the error of the call says more than one of the store."""
    with contextlib.suppress(StoreError):
        store.operator_calls.add(call, f"failed: {error}", refused=True)


def local_call(call: str, arguments: Mapping[str, Any]) -> Call:
    """Returns a call that this process makes."""
    return Call(LOCAL, local_user(), call, arguments, LOCAL)


def local_user() -> str:
    """Returns the name of the user who runs this process; `unknown` if the system has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
