"""Follows a run in its store.

Every change is a dictionary whose `kind` is run, round, step or event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.service.served import may_be_present, served
from fleetdistill_server.store.run_figures import RoundFigures
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.states import AT_REST, RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import round_or_none
from fleetdistill_server.views.runs import TableRow, run_row

LOOK_SECONDS = 0.5
_AS_LISTED = ("status", "reason", "present")
"""What is said of the run as `runs list` says it, such as that no server works on it."""


def changes(store: Store, directory: Path, run: str, seen: dict[str, TableRow]) -> list[TableRow]:
    """Returns the changes in a run since the previous call, oldest first.

    Args:
        store: Store that contains the run.
        directory: The store's directory, which says what its server works on.
        run: Name of the run.
        seen: State of earlier calls, updated by this function; empty at first.

    Raises:
        ConfigurationError: The run does not exist.
    """
    found = store.runs.get(run)
    if found is None:
        raise ConfigurationError(no_such_run(run, store.runs.names()))
    present = may_be_present(directory, store)
    # Read before the progress: what is read after a final status is complete.
    shown = run_row(store, found, served(directory, store), present=present)
    progress = store.runs.progress(run, int(seen.get("last event", {}).get("id", 0)))
    if progress is None:
        raise ConfigurationError(no_such_run(run, store.runs.names()))
    for event in progress.events:
        seen["last event"] = {"id": event["id"]}
    rounds = [("round", _round_row(figures)) for figures in progress.rounds]
    rows = [
        *(("step", row) for row in progress.steps),
        *rounds,
        ("run", progress.run | {name: shown[name] for name in _AS_LISTED}),
    ]
    changes = [{"kind": "event", "event": row["kind"], **_without(row, "id", "kind")} for row in progress.events]
    for kind, row in rows:
        name = f"{kind} {row.get('round', '')} {row.get('step_number', '')}"
        if seen.get(name) != row:
            seen[name] = row
            changes.append({"kind": kind, **row})
    return sorted(changes, key=_sort_key)


def _round_row(figures: RoundFigures) -> TableRow:
    shown = figures.round
    return {
        "round": shown.number,
        "status": shown.status,
        "reason": shown.reason or None,
        "devices": len(shown.cohort),
        "answers": figures.answers.accepted,
        "used": figures.answers.used,
        "reported": figures.answers.reported,
        "test_accuracy": round_or_none(figures.test_accuracy, 4),
        "guards": figures.guards,
        "bytes_up": figures.bytes_up,
        "bytes_down": figures.bytes_down,
        "seconds": round_or_none(shown.seconds, 2),
    }


def _without(row: TableRow, *names: str) -> TableRow:
    return {name: value for name, value in row.items() if name not in names}


def _sort_key(change: TableRow) -> tuple[bool, int, int]:
    """Returns the sort key: by round, with a round's end after its steps and events, and the run itself last."""
    ended = change["kind"] == "round" and change["status"] != RoundStatus.OPEN
    order = {"round": 3 if ended else 0, "step": 1, "event": 2, "run": 4}[str(change["kind"])]
    return change["kind"] == "run", int(change.get("round", 0)), order


def is_over(new: list[TableRow]) -> bool:
    """Returns whether the run has ended according to these changes."""
    return any(item["kind"] == "run" and item["status"] in AT_REST for item in new)


def _pause() -> None:
    time.sleep(LOOK_SECONDS)


def follow(store: Store, directory: Path, run: str, wait: Callable[[], object] = _pause) -> Iterator[list[TableRow]]:
    """Yields the changes in a run until it ends.

    Args:
        store: Store that contains the run.
        directory: The store's directory.
        run: Name of the run.
        wait: Called between two reads of the store.
    """
    seen: dict[str, TableRow] = {}
    while True:
        new = changes(store, directory, run, seen)
        yield new
        if is_over(new):
            return
        wait()
