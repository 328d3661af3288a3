"""Cancelling a run for good."""

from __future__ import annotations

from fleetdistill_server.service.run_endings import mark_cancelled
from fleetdistill_server.store.store import Store


def cancel(store: Store, run: str) -> bool:
    """Ends a run now, whoever serves it: the open round is taken back, devices are sent home at their next call.

    One transaction; the engine that works on the run fails at its next commit, and its supervisor ends it. Devices that
    it was to forget before its next round are forgotten here.

    Args:
        store: Of the run.
        run: The run.

    Returns:
        False if it was over before.

    Raises:
        ConfigurationError: There is no such run.
    """
    cancelled = mark_cancelled(store, run)
    waiting = store.devices.to_forget(run)
    if waiting:
        from fleetdistill_server.engine.forgetting import ask_to_forget  # loads torch, which cancelling needs not

        ask_to_forget(store, run, waiting[0], served=None)
    return cancelled
