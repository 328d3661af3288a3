"""The state of each device in a round: asked, downloading, training, uploading, acknowledged, or out of it and why."""

from __future__ import annotations

from fleetdistill_server.store.records import Ask, Upload
from fleetdistill_server.store.states import DEADLINE_PASSED, AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.runs import TableRow, View

ACKNOWLEDGED, OUT = "acknowledged", "out"
"""States of a device that has answered, and of one that is out of the round for no more special reason."""
_LEFT = ("device left", "device not present", "device revoked", "device to be forgotten", "lease ended")
"""Reasons stored for asks of devices that are gone."""


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
    facts = dict.fromkeys(("round", "status", "started_at", "ended_at"))
    for shown, _ in store.summaries.rounds(run, number, number):
        facts = {
            "round": shown.number,
            "status": shown.status,
            "started_at": shown.started_at,
            "ended_at": shown.ended_at,
        }
    asks = [state_of(ask, upload) for ask, upload in store.summaries.asks_of_round(run, number)]
    return View({"asks": asks}, {**facts, "paused_at": paused_at})


def state_of(ask: Ask, upload: Upload | None) -> TableRow:
    """Returns the state of an ask: device, round, step, state, reason, and what happened when."""
    return {
        "round": ask.round,
        "step_number": ask.step_number,
        "step": ask.step,
        "device": ask.device,
        "state": _state(ask),
        "reason": ask.reason,
        "asked_at": ask.asked_at,
        "sent_at": ask.sent_at,
        "download_at": ask.download_at,
        "downloaded_at": ask.downloaded_at,
        "upload_at": ask.upload_at,
        "acknowledged_at": None if upload is None else upload.received_at,
        "deadline_at": ask.deadline_at,
    }


def _state(ask: Ask) -> str:
    if ask.status is AskStatus.ANSWERED:
        return ACKNOWLEDGED
    return _open_state(ask) if ask.status is AskStatus.OPEN else _out_state(ask.reason)


def _open_state(ask: Ask) -> str:
    if ask.upload_at is not None:
        return "uploading"
    if ask.downloaded_at is not None:
        return "training"
    if ask.download_at is not None:
        return "downloading"
    return "training" if ask.sent_at is not None and not ask.payload else "asked"


def _out_state(reason: str) -> str:
    if reason == DEADLINE_PASSED:
        return "late"
    if reason in _LEFT:
        return "left"
    if reason.startswith("refused: "):
        return "refused"
    return "declined" if reason == "declined" else OUT
