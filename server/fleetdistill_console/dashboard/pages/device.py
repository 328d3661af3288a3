"""One device of a run: its figures, asks and answers, what was refused, and its certificates."""

from __future__ import annotations

import time
from calendar import timegm
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard import readers, table
from fleetdistill_console.dashboard.actions import RevokeButton
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.chart import AccuracyAndLoss, Point
from fleetdistill_console.dashboard.layout import Notice, Tiles, frame, live, panel, run_link
from fleetdistill_console.dashboard.panels.tables import presence
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import UNKNOWN, duration, percent
from fleetdistill_server.views.runs import TableRow, View

_PRESENCE, _MODEL, _SAMPLES, _ACCURACY = "Presence", "Model", "Training samples", "Last test accuracy"
_ROUNDS, _ANSWERS, _UNANSWERED, _CERTIFICATE = "Rounds", "Answers", "Late, declined, refused", "Certificate"
_SEEN, _SDK = "Last seen (UTC)", "SDK"
_ASKS = [
    table.number("round", "Round", minWidth=75, sort="desc"),
    table.text("step", "Step", minWidth=100),
    table.text("state", "State", minWidth=120),
    table.time("asked", "Asked (UTC)", minWidth=165, to="second"),
    table.number("seconds", "Answered after (s)", minWidth=100),
    table.size("bytes", "Answer", minWidth=90),
    table.text("upload", "In the result", minWidth=90),
    table.text("why", "Why not", flex=3, minWidth=200, wrapText=True, autoHeight=True),
]
_EVENTS = [
    table.time("at", "When (UTC)", minWidth=165, to="second", sort="desc"),
    table.number("round", "Round", minWidth=75),
    table.text("kind", "Kind", minWidth=130),
    table.text("code", "Code", minWidth=110),
    table.text("text", "What happened", flex=5, minWidth=300, wrapText=True, autoHeight=True),
]
_CERTIFICATES = [
    table.text("serial", "Serial number", flex=2, minWidth=260),
    table.text("run", "Only for run", minWidth=120),
    table.time("issued", "Issued (UTC)", minWidth=150),
    table.time("expires", "Valid until (UTC)", minWidth=150, sort="desc"),
]
_USED = {"used": "yes", "reported": "no", "acknowledged": "not yet"}


def show(board: Board, run: str, device: str) -> None:
    """Shows a device and keeps it up to date.

    Args:
        board: What all pages share.
        run: Name of the run.
        device: Id of the device.
    """
    with frame(board, device, [("Runs", "/"), (run, run_link(run))]):
        notice = Notice()
        parts = _Parts(board, run, device)

        def update() -> None:
            snapshot = board.feed.look(readers.device(run, device))
            notice.show(snapshot)
            if snapshot.value is not None:
                parts.show(snapshot.value)

        live(update)


class _Parts:
    """The parts of the page."""

    def __init__(self, board: Board, run: str, device: str) -> None:
        names = (_PRESENCE, _CERTIFICATE, _ACCURACY, _MODEL, _SAMPLES, _ROUNDS, _ANSWERS, _UNANSWERED, _SEEN, _SDK)
        with ui.element("div").classes("fd-row"):
            self._revoke = RevokeButton(board, device)
        self._tiles = Tiles(names)
        with panel("Accuracy and loss"):
            self._charts = AccuracyAndLoss()
        with panel("Asks and answers"):
            self._asks = LiveTable(
                "Asks and answers",
                _ASKS,
                f"Run {run} has not asked this device yet.",
                "26rem",
                first=("round", "state", "why"),
            )
        with panel("Refusals and other events"):
            empty = "Nothing of this device was refused, late or unusual."
            self._events = LiveTable("Events of the device", _EVENTS, empty, first=("text", "at"))
        with panel("Certificates"):
            empty = "The device has no certificate: it has not enrolled, or the server uses plain text."
            self._certificates = LiveTable("Certificates of the device", _CERTIFICATES, empty)

    def show(self, view: View) -> None:
        """Shows a view of the device."""
        facts, waits = view.facts, "Shown once the device has reported it; its app must allow metrics."
        self._revoke.update(facts["revoked"])
        self._tiles.show(tiles(facts))
        figures = view.lists["figures"]
        self._charts.show(series(figures, "accuracy", 100), series(figures, "loss", 1), "round", "", waits)
        self._asks.show([ask_cells(row) for row in view.lists["asks"]])
        self._events.show([{**row, "id": number} for number, row in enumerate(view.lists["events"])])
        self._certificates.show([{**row, "id": row["serial"]} for row in view.lists["certificates"]])


def tiles(facts: TableRow) -> dict[str, str]:
    """Returns the figures at the top of the page."""
    named = facts["model"] or UNKNOWN
    return {
        _PRESENCE: presence(facts),
        _CERTIFICATE: certificate(facts),
        _ACCURACY: percent(facts["test_accuracy"]),
        _MODEL: f"{named} ({facts['parameters']:,} parameters)" if facts["parameters"] else named,
        _SAMPLES: f"{facts['samples']:,}",
        _ROUNDS: f"{facts['rounds']:,}",
        _ANSWERS: f"{facts['answers']:,} of {facts['asks']:,} asks",
        _UNANSWERED: f"{facts['late']:,}, {facts['declined']:,}, {facts['refusals']:,}",
        _SEEN: facts["last_seen"],
        _SDK: facts["sdk"] or UNKNOWN,
    }


def certificate(facts: TableRow, now: float | None = None) -> str:
    """Returns the state of a device's newest certificate in words.

    Args:
        facts: The device, with `revoked` and `certificate_expires`, ISO 8601 in UTC or None.
        now: Seconds since 1970; default: the current time.
    """
    if facts["revoked"]:
        return "revoked"
    if facts["certificate_expires"] is None:
        return "none (plain text)"
    left = timegm(time.strptime(facts["certificate_expires"], "%Y-%m-%dT%H:%M:%SZ")) - (
        time.time() if now is None else now
    )
    return f"valid for {duration(left)}" if left > 0 else f"expired {duration(-left)} ago"


def series(figures: Sequence[TableRow], name: str, factor: float) -> dict[str, list[Point]]:
    """Returns the reported figures with a name, or of a further variant of it, by variant and split."""
    result: defaultdict[str, list[Point]] = defaultdict(list)
    for row in figures:
        variant, _, last = row["name"].rpartition("/")
        if last == name and row["mean"] is not None:
            result[f"{variant} {row['split']}".strip()].append((row["round"], round(factor * row["mean"], 4)))
    return dict(result)


def ask_cells(row: TableRow) -> dict[str, Any]:
    """Returns an ask as a row of the table."""
    answered, asked = row["acknowledged_at"], row["asked_at"]
    return {
        **{name: row[name] for name in ("round", "step", "state", "bytes")},
        "id": f"{row['round']}/{row['step_number']}",
        "asked": None if asked is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(asked)),
        "seconds": None if None in (answered, asked) else round(answered - asked, 2),
        "upload": _USED.get(row["upload"] or "", ""),
        "why": row["not_used_because"] or row["reason"],
    }
