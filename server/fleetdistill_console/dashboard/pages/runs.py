"""All runs of the source."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Notice, frame, live, run_link
from fleetdistill_console.dashboard.pages.server import Glance
from fleetdistill_console.dashboard.readers import RUNS
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import percent
from fleetdistill_server.store.states import ACTIVE
from fleetdistill_server.views.runs import NO_SERVER, TableRow


def show(board: Board) -> None:
    """Shows all runs, sorted and filtered by the reader."""
    with frame(board, "Runs"):
        notice = Notice()
        glance = Glance(board)
        search = ui.input("Filter runs", placeholder="name, method or status").props("dense outlined clearable")
        search.classes("fd-filter")
        shown = LiveTable("Runs", _COLUMNS, "There are no runs yet. Start one: fleetdistill serve run.toml", "36rem")
        search.on_value_change(lambda event: shown.filter(event.value or ""))

        def update() -> None:
            snapshot = board.feed.look(RUNS)
            glance.update()
            notice.show(snapshot)
            if snapshot.value is not None:
                shown.show([_cells(row) for row in snapshot.value.lists["runs"]])

        live(update)


_COLUMNS = [
    table.link("run", "Run", "link", width=140, flex=0, pinned="left"),
    table.text("status", "Status", flex=2, minWidth=180),
    table.text("method", "Method", minWidth=100),
    table.text("progress", "Rounds completed", minWidth=140),
    table.seconds("seconds_left", "Time left", minWidth=90),
    table.rate("accuracy", "Last accuracy", minWidth=95),
    table.text("present", "Devices present", minWidth=140),
    table.size("bytes_up", "Received", minWidth=105),
    table.size("bytes_down", "Sent", minWidth=95),
    table.time("created", "Created (UTC)", minWidth=150),
]


def is_at_work(row: TableRow) -> bool:
    """Returns whether a run goes on by itself, so that its time left means something."""
    status = str(row["status"])
    return status.startswith(ACTIVE) and NO_SERVER not in status


def accuracy(row: TableRow) -> float | None:
    """Returns a run's newest accuracy: the fleet's, else one that its method measured, else the global model's."""
    known = (row["test_accuracy"], *row["method_accuracies"].values(), row["global_accuracy"])
    return next((rate for rate in known if rate is not None), None)


def _cells(row: TableRow) -> dict[str, Any]:
    done, wanted = row["completed_rounds"], row["wanted_rounds"]
    progress = f"{done} of {wanted} ({percent(done / wanted)})" if wanted else f"{done}, until stopped"
    row = {**row, "seconds_left": row["seconds_left"] if is_at_work(row) else None}
    present = f"{row['present']:,} of {row['devices']:,} registered"
    shown = {"progress": progress, "accuracy": accuracy(row), "present": present}
    return {**row, "id": row["run"], "link": run_link(row["run"]), **shown}
