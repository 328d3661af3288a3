"""Ending a run for good: cancelling it, and deleting it with all that it keeps."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_server.service.serve_lock import kept_from_serving
from fleetdistill_server.store.retention import Pruned, prune, sweep_all
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store


def mark_cancelled(store: Store, run: str) -> bool:
    """Ends a run now; see `fleetdistill_server.engine.cancelling.cancel`. Needs no torch, and deletes no files."""
    with store.transaction():
        row = store.runs.get(run)
        if row is None:
            raise ConfigurationError(no_such_run(run, store.runs.names()))
        return store.runs.cancel(run, f"by the operator, after {row['completed_rounds']} rounds")


def delete(directory: Path, store: Store, run: str) -> Pruned:
    """Deletes a run with its rows, payloads and checkpoint, in whatever state it is; what other runs need stays.

    The rows go in one transaction, then the files. If that is broken off, the next call deletes what is left.

    Args:
        directory: Of the store.
        store: Of the run.
        run: The run.

    Returns:
        What it had; nothing for a run that is not there.

    Raises:
        RunError: The run is being served.
        StoreError: Another process deletes or makes a backup, and does not end.
    """
    with kept_from_serving(directory) as served:
        if served == run:
            raise RunError(
                f"run {run!r} is being served; stop its server first, or only end the run with "
                f"`fleetdistill runs cancel {run}`"
            )
        gone = prune(store, run, whole=True, served=served) if store.runs.get(run) is not None else Pruned()
        if served is None:
            sweep_all(store, ())
        return gone
