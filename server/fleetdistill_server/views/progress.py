"""The state of each device in a round: asked, downloading, training, uploading, acknowledged, or out of it and why."""

from __future__ import annotations

from fleetdistill_server.store.database import Row
from fleetdistill_server.store.states import DEADLINE_PASSED
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.runs import View

_LEFT = ("device left", "device not present", "device revoked", "device to be forgotten", "lease ended")
"""Reasons stored for asks of devices that are gone."""
_TIMES = ("asked_at", "sent_at", "download_at", "downloaded_at", "upload_at", "received_at", "deadline_at")


def round_progress(store: Store, run: str, number: int | None = None) -> View:
    """Returns the asks of a round and their devices' states, with times in seconds since 1970, by step and device.

    Open asks of other rounds, which occur with buffered rounds, are included. While the fact `paused_at` is not None,
    deadlines stand still: they move by the time of the pause once an engine works on the run again.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        number: Number of the round; None for the open round, or the newest one if none is open.

    Raises:
        ConfigurationError: The run does not exist.
    """
    paused_at = store.runs.existing(run).paused_at
    if number is None:
        number = store.runs.open_number(run) or store.summaries.last_round(run)
    known = next(iter(store.summaries.rounds(run, number, number)), {})
    facts = {name: known.get(name) for name in ("round", "status", "started_at", "ended_at")}
    asks = [state_of(ask) for ask in store.summaries.asks_of_round(run, number)]
    return View({"asks": asks}, {**facts, "paused_at": paused_at})


def state_of(ask: Row) -> Row:
    """Returns the state of an ask: device, round, step, state, reason, and what happened when."""
    names = ("round", "step_number", "step", "device")
    times = {name.replace("received_at", "acknowledged_at"): ask[name] for name in _TIMES}
    return {**{name: ask[name] for name in names}, "state": _state(ask), "reason": ask["reason"] or "", **times}


def _state(ask: Row) -> str:
    if ask["status"] == "answered":
        return "acknowledged"
    return _open_state(ask) if ask["status"] == "open" else _out_state(ask["reason"] or "")


def _open_state(ask: Row) -> str:
    if ask["upload_at"] is not None:
        return "uploading"
    if ask["downloaded_at"] is not None:
        return "training"
    if ask["download_at"] is not None:
        return "downloading"
    return "training" if ask["sent_at"] is not None and ask["payload"] is None else "asked"


def _out_state(reason: str) -> str:
    if reason == DEADLINE_PASSED:
        return "late"
    if reason in _LEFT:
        return "left"
    if reason.startswith("refused: "):
        return "refused"
    return "declined" if reason == "declined" else "out"
