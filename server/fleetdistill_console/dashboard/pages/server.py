"""The server as a whole: its processes, queue, disk, certificates, backups, operators' calls and versions."""

from __future__ import annotations

import time
from calendar import timegm
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from fleetdistill_console.commands.operators import cells
from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.actions import may_act
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Notice, Tiles, frame, live, panel, run_link
from fleetdistill_console.dashboard.readers import CALLS, RUNS, SERVER
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import UNKNOWN, duration, size
from fleetdistill_server.store.states import QUEUED, WAITING
from fleetdistill_server.views.results import missing_in
from fleetdistill_server.views.runs import NO_SERVER, TableRow, View
from fleetdistill_server.views.server import OF_FORGOTTEN_CA, REVOKED

_ENGINES, _RUNS, _DISK, _EXPIRY, _BACKUP = "Engines", "Runs", "Free disk", "Next certificate to expire", "Last backup"
_WORST = {"bad": "fd-bad", "warn": "fd-warn", "good": "fd-good"}
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


class Glance:
    """A sentence on the server, and its figures."""

    def __init__(self, board: Board) -> None:
        self._board = board
        with panel("Server"):
            self._sentence = ui.label("Loading …").props("role=status").classes("fd-glance")
            self._tiles = Tiles((_ENGINES, _RUNS, _DISK, _EXPIRY, _BACKUP))

    def update(self) -> None:
        """Shows the newest state."""
        snapshot = self._board.feed.look(SERVER)
        runs = self._board.feed.look(RUNS).value
        view = snapshot.value
        if view is None or runs is None:
            self._sentence.text = snapshot.error or self._sentence.text
            return
        severity, text = sentence(view, self._board.problem() or snapshot.error)
        self._sentence.text = text
        self._sentence.classes(replace=f"fd-glance {_WORST[severity]}")
        self._tiles.show(tiles(view, runs.lists["runs"]))


def sentence(view: View, problem: str) -> tuple[str, str]:
    """Returns how the server is (bad, warn or good), and what to say.

    Args:
        view: The view `server`.
        problem: What is wrong besides, such as that the server does not answer; may be empty.
    """
    facts = view.facts
    result = facts["problems"] or ([problem] if problem else [])
    wrong = list(dict.fromkeys([*result, *facts.get("failed_runs", ())]))
    if wrong:
        return "bad", f"Something is wrong: {'; '.join(wrong)}."
    if not facts["serves"]:
        return (
            "warn",
            "No server works on this store. Start one with `fleetdistill serve server.toml`.",
        )
    if facts["warnings"]:
        return "warn", f"The server works, but {'; '.join(facts['warnings'])}."
    return "good", f"Everything is all right{_waiting(view.lists['queue'])}."


def _waiting(queue: Sequence[TableRow]) -> str:
    states = Counter(_without_details(row["status"]) for row in queue)
    waits = {"devices": states[WAITING], "an engine": states[QUEUED]}
    words = [
        f"{count} {'run waits' if count == 1 else 'runs wait'} for {what}" for what, count in waits.items() if count
    ]
    return f"; {', '.join(words)}" if words else ""


def tiles(view: View, runs: Sequence[TableRow], now: float | None = None) -> dict[str, str]:
    """Returns the figures of the server; `now` is in seconds since 1970, by default the current time."""
    now = time.time() if now is None else now
    facts, lists = view.facts, view.lists
    used = sum(row["engine"] for row in lists["queue"])
    states = Counter(_without_details(row["status"]) for row in runs)
    valid = [
        row for row in lists["certificates"] if not row["device"] and row["state"] not in (REVOKED, OF_FORGOTTEN_CA)
    ]  # devices renew their own
    expiring = min(valid, key=lambda row: str(row["expires"]), default=None)
    return {
        _ENGINES: f"{used} of {facts['engines_at_once']} in use" if facts["serves"] else UNKNOWN,
        _RUNS: ", ".join(f"{count:,} {state}" for state, count in sorted(states.items())) or "none",
        _DISK: size(facts["disk_free"]),
        _EXPIRY: UNKNOWN if expiring is None else f"{expiring['holder']}, {_from_now(expiring['expires'], now)}",
        _BACKUP: backup(lists["backups"], now),
    }


def _without_details(status: str) -> str:
    state, _, detail = status.partition(" (")
    return "without a server" if detail == f"{NO_SERVER})" else state


def backup(rows: Sequence[TableRow], now: float) -> str:
    """Returns when the last successful backup was made, and what is missing in it."""
    done = next((row for row in rows if row["result"].startswith("done")), None)
    return "none by fleetdistill" if done is None else _from_now(done["at"], now) + missing_in(done["result"])


def _from_now(at: str, now: float) -> str:
    left = timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")) - now
    return f"in {duration(left)}" if left > 0 else f"{duration(-left)} ago"


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
