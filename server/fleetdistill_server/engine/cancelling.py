"""Cancels a run permanently."""

from __future__ import annotations

from fleetdistill_server.service.run_endings import mark_cancelled
from fleetdistill_server.store.store import Store


def cancel(store: Store, run: str) -> bool:
    """Ends a run immediately, even while a server serves it.

    One transaction discards the open round and ends the run. Devices learn this at their next call. A running
    engine fails at its next commit and is stopped by its supervisor. Devices whose deletion was requested but not
    yet carried out are forgotten here.

    Args:
        store: Store that contains the run.
        run: Name of the run.

    Returns:
        True if this call ended the run; False if it was already over.

    Raises:
        ConfigurationError: The store has no run of this name.
    """
    cancelled = mark_cancelled(store, run)
    waiting = store.devices.to_forget(run)
    if waiting:
        from fleetdistill_server.engine.forgetting import ask_to_forget  # imports torch; rarely needed

        ask_to_forget(store, run, waiting[0], served=False)
    return cancelled
