"""All runs of the source."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from fleetdistill_server.dashboard import table
from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import Notice, frame, run_link
from fleetdistill_server.dashboard.table import LiveTable
from fleetdistill_server.views.runs import View

SUBJECT = "runs"


def show(board: Board) -> None:
    """Shows all runs, sorted and filtered by the reader."""
    with frame(board, "Runs"):
        notice = Notice()
        search = ui.input("Filter runs", placeholder="name, method or status").props("dense outlined clearable")
        shown = LiveTable("Runs", _COLUMNS, "There are no runs yet. Start one with: fleetdistill serve run.toml")
        search.on_value_change(lambda event: shown.filter(event.value or ""))

        def update() -> None:
            snapshot = board.feed.look(SUBJECT, lambda: lambda source: source.runs())
            notice.show(snapshot)
            if snapshot.value is not None:
                shown.show(rows(snapshot.value))

        ui.timer(0.5, update)


_COLUMNS = [
    table.link("run", "Run", "link", flex=2),
    table.text("method", "Method"),
    table.text("status", "Status", flex=2),
    table.number("completed_rounds", "Rounds completed"),
    table.number("wanted_rounds", "Rounds wanted"),
    table.number("devices", "Devices"),
    table.text("started", "Created (UTC)", flex=1),
]


def rows(view: View) -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    return [{**row, "id": row["run"], "link": run_link(row["run"])} for row in view.lists["runs"]]
