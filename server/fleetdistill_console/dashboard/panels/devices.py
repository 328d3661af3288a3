"""The devices of a run, with their state in the round under way."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import device_link, panel
from fleetdistill_console.dashboard.panels.round import newest_asks
from fleetdistill_console.dashboard.readers import participants, round_under_way
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_server.views.runs import TableRow

_COLUMNS = [
    table.link("device", "Device", "link", width=130, flex=0, pinned="left", sort="asc"),
    table.text("presence", "Presence", minWidth=95),
    table.text("state", "In this round", minWidth=105),
    table.rate("test_accuracy", "Accuracy", minWidth=95),
    table.number("samples", "Samples", minWidth=80, filter=False),
    table.text("answered", "Answers", minWidth=85, filter=False),
    table.number("late", "Late", minWidth=55, filter=False),
    table.number("declined", "Declined", minWidth=80, filter=False),
    table.number("refusals", "Refused", minWidth=75, filter=False),
    table.text("model", "Model", minWidth=100),
    table.text("sdk", "SDK", minWidth=65),
    table.time("last_seen", "Last seen (UTC)", minWidth=128),
    table.time("certificate_expires", "Certificate until", to="day", minWidth=108),
]


class DevicesPanel:
    """A table of all devices."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Devices"):
            search = ui.input("Filter devices", placeholder="id, state or model").props("dense outlined clearable")
            search.classes("fd-filter")
            empty = "No device has checked in yet. The tab Add a device has the lines for an app."
            self._table = LiveTable("Devices of the run", _COLUMNS, empty, "34rem")
            search.on_value_change(lambda event: self._table.filter(event.value or ""))

    def update(self) -> None:
        """Shows the newest rows."""
        view = self._board.feed.look(participants(self._run)).value
        asked = self._board.feed.look(round_under_way(self._run)).value
        if view is not None and asked is not None:
            states = {ask["device"]: ask["state"] for ask in newest_asks(asked.lists["asks"])}
            self._table.show([_cells(self._run, row, states.get(row["device"], "")) for row in view.lists["devices"]])


def presence(row: TableRow) -> str:
    """Returns whether a device is there, in a word."""
    if row["revoked"]:
        return "revoked"
    if row["forgotten"]:
        return "forgotten" if row["forgotten"] != "asked" else "to be forgotten"
    return "present" if row["present"] else "away"


def _cells(run: str, row: TableRow, state: str) -> dict[str, Any]:
    shown = {"presence": presence(row), "state": state, "answered": f"{row['answers']:,} of {row['asks']:,}"}
    return {**row, "id": row["device"], "link": device_link(run, row["device"]), **shown}
