"""The server as a whole: its processes, queue, disk, certificates, backups, operators' calls and versions."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from fleetdistill_console.commands.operators import cells
from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.actions import may_act
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Notice, Tiles, frame, live, panel, run_link
from fleetdistill_console.dashboard.panels.server import Glance
from fleetdistill_console.dashboard.readers import CALLS, SERVER
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import size

_LISTS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "processes": (
        "Processes",
        [
            table.text("process", "Process", minWidth=115),
            table.text("run", "Run"),
            table.text("state", "State"),
            table.number("pid", "Process id", minWidth=95, **{":valueFormatter": "params => params.value ?? ''"}),
            table.number("restarts", "Restarts", minWidth=100),
        ],
        "No server works on this store.",
    ),
    "queue": (
        "Engines and queue",
        [table.link("run", "Run", "link"), table.text("status", "Status", flex=2), table.text("has", "Engine")],
        "No run needs an engine.",
    ),
    "certificates": (
        "Certificates",
        [
            table.text("holder", "Holder"),
            table.text("state", "State"),
            table.time("expires", "Valid until (UTC)", minWidth=150),
        ],
        "The server uses plain text, or its certificates cannot be read from here.",
    ),
    "backups": (
        "Last backups",
        [
            table.time("at", "When (UTC)", to="second", minWidth=165),
            table.text("result", "Result", flex=3, minWidth=200),
        ],
        "No backup was made with fleetdistill backup.",
    ),
    "versions": (
        "Versions",
        [table.text("name", "Part"), table.text("version", "Version")],
        "Not known.",
    ),
}
_WRAPPED = {"wrapText": True, "autoHeight": True}
_CALLS = [
    table.time("at", "When (UTC)", to="second", minWidth=165),
    table.text("who", "Who", flex=2, minWidth=110, **_WRAPPED),
    table.text("what", "Operation", flex=2, minWidth=110, **_WRAPPED),
    table.text("run", "Run", minWidth=90, **_WRAPPED),
    table.text("result", "Result", flex=5, minWidth=200, **_WRAPPED),
]
_DATABASE, _PAYLOADS = "Database", "Payloads"
_USED, _FREE, _KEEP = "Size of the store", "Free on its disk", "Uploads are refused below"


def show(board: Board) -> None:
    """Shows the server and keeps it up to date."""
    with frame(board, "Server"):
        notice = Notice()
        glance = Glance(board)
        tables = {name: _table(name) for name in ("processes", "queue")}
        with panel("Store and disk"):
            tiles = Tiles((_DATABASE, _PAYLOADS, _USED, _FREE, _KEEP))
            place = ui.label().classes("fd-muted")
        tables |= {name: _table(name) for name in ("certificates", "backups", "versions")}
        with ui.element("div") as calls_box, panel("Operators' calls"):
            calls = LiveTable("Operators' calls", _CALLS, "Nobody has changed anything yet.", first=("result", "who"))

        def update() -> None:
            snapshot = board.feed.look(SERVER)
            notice.show(snapshot)
            glance.update()
            calls_box.set_visibility(may_act(board))
            if may_act(board) and (made := board.feed.look(CALLS).value) is not None:
                calls.show([{"id": row["id"], **cells(row)} for row in made.lists["operators"]])
            if snapshot.value is None:
                return
            facts, lists = snapshot.value.facts, snapshot.value.lists
            for name, shown in tables.items():
                shown.show([_row(name, number, row) for number, row in enumerate(lists[name])])
            place.text = f"The store is in {facts['store']}."
            tiles.show(
                {
                    _DATABASE: facts["database"],
                    _PAYLOADS: facts["payloads"],
                    _USED: size(facts["disk_used"])
                    + (f" of {size(facts['disk_budget'])}" if facts["disk_budget"] else ""),
                    _FREE: size(facts["disk_free"]),
                    _KEEP: size(facts["keep_free"]),
                }
            )

        live(update)


def _table(name: str) -> LiveTable:
    heading, columns, empty = _LISTS[name]
    with panel(heading):
        return LiveTable(heading, columns, empty)


def _row(name: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    if name == "queue":
        return {**row, "id": row["run"], "link": run_link(row["run"]), "has": "yes" if row["engine"] else "no"}
    return {**row, "id": number}
