"""Rolls runs back, and deletes runs with all their data."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import RunError
from fleetdistill_server.service.engine_files import delete_engine_files
from fleetdistill_server.service.serve_lock import without_server
from fleetdistill_server.store import rollback
from fleetdistill_server.store.retention import Pruned, prune, sweep_all
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.states import ACTIVE
from fleetdistill_server.store.store import Store


def roll_back(directory: Path, store: Store, run: str, to: int, who: str) -> RolledBack:
    """Rolls a run back to the state after a round, also while a server works on others.

    Args:
        directory: The store's directory.
        store: The store.
        run: Name of the run.
        to: Round number; 0 for the state before the first round.
        who: The operator, for the run's events.

    Raises:
        ConfigurationError: The run does not exist, or it has no checkpoint of that round.
        RunError: A server works on the run.
        DamagedError: The checkpoint of that round is missing or damaged.
    """
    with without_server(directory) as served:
        if served is not None and served.includes(run):
            status = store.runs.status(run)
            if served.run:
                raise RunError(f"run {run!r} is being served; stop its server first")
            if status in ACTIVE:
                raise RunError(f"run {run!r} is {status}; stop it first with `fleetdistill runs stop {run}`")
        return rollback.roll_back(store, run, to, who)


def delete(directory: Path, store: Store, run: str) -> Pruned | None:
    """Deletes a run in any state with its rows, payloads and checkpoints, except files that other runs need.

    Deletes the rows in one transaction, which takes the run from its engine too, then the files. If interrupted, the
    next call deletes the rest.

    Args:
        directory: The store's directory.
        store: The store.
        run: Name of the run.

    Returns:
        What was deleted; None for an unknown run.

    Raises:
        RunError: A server serves only this run.
        StoreError: Another process holds the deletion lock, for example during a backup.
    """
    with without_server(directory) as served:
        if served is not None and served.run == run:
            raise RunError(
                f"run {run!r} is being served; stop its server first, or only end the run with "
                f"`fleetdistill runs cancel {run}`"
            )
        known = store.runs.get(run) is not None
        gone = prune(store, run, whole=True, served=served is not None) if known else None
        if served is None:
            delete_engine_files(directory, run)
            sweep_all(store, ())
        return gone
