"""Entering a run in the store, new or known: what may change between two starts of it, and what belongs to it for good.

Settings of [run] that say how long and with how many devices the run goes belong to whoever operates it; they may
change at each start. All else is the run's identity: another value is another run, and is refused once a round of this
one is completed, even if it was undone since. Before that the run is replaced, so that no mistake in run.toml uses up
a name; but only when a server starts, not beneath a front whose devices hold the run's contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetdistill.errors import RunError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_changes import Changes, changes_between, refusal, told
from fleetdistill_server.config.run_config import OPERATORS, RunConfig, completed_part
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store

_MINE = {f"run.{name}" for name in OPERATORS}


def register(store: Store, config: RunConfig) -> None:
    """Enters a run, or takes a known one up with what the operator has changed. One transaction, or nothing.

    A finished run whose `rounds` was raised goes on. What was changed is an event of the run.

    Raises:
        RunError: The run is known and cannot go on with this configuration; the message says why.
    """
    name, settings = config.run.name, json.loads(json.dumps(config.fixed_part()))
    with store.transaction():
        row = store.runs.get(name)
        if row is None:
            store.runs.begin(name, settings)
            return
        if row["status"] == "cancelled":
            raise RunError(
                f"run {name!r} was cancelled; give the next run another name, or delete this one with "
                f"`fleetdistill runs delete {name}`"
            )
        changes = changes_between(completed_part(json.loads(row["config"])), settings)
        if changes.keys() - _MINE:
            _replace(store, row, settings, changes)
            return
        if "run.rounds" in changes:
            _check_rounds(row, config.run.rounds)
        if changes:
            store.runs.change(name, settings, _with_settings(row["contract"], config))
            store.history.add_event(name, "settings-changed", told(changes))
        if row["status"] == "finished" and _wants_more(row, config.run.rounds):
            store.runs.end(name, "running", "")


def is_prepared(store: Store, config: RunConfig) -> bool:
    """Whether a run was begun with this identity and has its contract, so that its models are known to work."""
    row = store.runs.get(config.run.name)
    if row is None or row["contract"] is None:
        return False
    changes = changes_between(completed_part(json.loads(row["config"])), config.fixed_part())
    return not changes.keys() - _MINE


def _replace(store: Store, row: Row, settings: Mapping[str, Any], changes: Changes) -> None:
    name = row["name"]
    if row["completed_rounds"] or any(one["status"] == "undone" for one in store.runs.rounds(name)):
        raise RunError(refusal(name, {key: both for key, both in changes.items() if key not in _MINE}))
    answers = len(store.asks.uploads(name))
    store.runs.delete(name)
    store.runs.begin(name, settings)
    text = f"a run of this name without a completed round was replaced: {told(changes)}"
    if answers == 1:
        text += "; 1 answer to it was deleted, so its device needs a new state_dir"
    elif answers:
        text += f"; {answers} answers to it were deleted, so their devices need a new state_dir"
    store.history.add_event(name, "run-replaced", text)


def _check_rounds(row: Row, rounds: int) -> None:
    """A run cannot have fewer rounds than it has completed; the last one may do more than others, so one is needed."""
    completed, over = row["completed_rounds"], row["status"] == "finished"
    if 0 < rounds < completed + (not over):
        raise RunError(
            f"run {row['name']!r} has completed {completed} rounds, [run] rounds is {rounds}; set it to at least "
            f"{completed + (not over)}, or end the run with `fleetdistill runs cancel {row['name']}`"
        )


def _wants_more(row: Row, rounds: int) -> bool:
    return rounds == 0 or rounds > row["completed_rounds"]


def _with_settings(contract: bytes | None, config: RunConfig) -> bytes | None:
    """The contract as devices read it at their next check-in."""
    if contract is None:
        return None
    changed = contract_pb2.Contract.FromString(contract)
    changed.rounds, changed.threads = config.run.rounds, config.run.threads
    return changed.SerializeToString()
