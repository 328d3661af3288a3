"""Cancels runs, and deletes runs with all their data."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_server.service.engine_files import delete_engine_files
from fleetdistill_server.service.serve_lock import without_server
from fleetdistill_server.store.retention import Pruned, prune, sweep_all
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store


def mark_cancelled(store: Store, run: str) -> bool:
    """Marks a run as cancelled, without torch and without deleting files.

    Returns whether the run's status has changed. See `fleetdistill_server.engine.cancelling.cancel`.
    """
    with store.transaction():
        row = store.runs.get(run)
        if row is None:
            raise ConfigurationError(no_such_run(run, store.runs.names()))
        return store.runs.cancel(run, f"by the operator, after {row['completed_rounds']} rounds")


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
