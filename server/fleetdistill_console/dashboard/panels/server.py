"""Whether everything is all right with the server, in a sentence and a few figures."""

from __future__ import annotations

import time
from calendar import timegm
from collections import Counter
from collections.abc import Sequence

from nicegui import ui

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Tiles, panel
from fleetdistill_console.dashboard.readers import RUNS, SERVER
from fleetdistill_console.dashboard.units import UNKNOWN, duration, size
from fleetdistill_server.views.results import missing_in
from fleetdistill_server.views.runs import NO_SERVER, TableRow, View

_ENGINES, _RUNS, _DISK, _EXPIRY, _BACKUP = "Engines", "Runs", "Free disk", "Next certificate to expire", "Last backup"
_WORST = {"bad": "fd-bad", "warn": "fd-warn", "good": "fd-good"}


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
        severity, text = sentence(view.facts, self._board.problem() or snapshot.error)
        self._sentence.text = text
        self._sentence.classes(replace=f"fd-glance {_WORST[severity]}")
        self._tiles.show(tiles(view, runs.lists["runs"]))


def sentence(facts: TableRow, problem: str) -> tuple[str, str]:
    """Returns how the server is (bad, warn or good), and what to say.

    Args:
        facts: Facts of the view `server`.
        problem: What is wrong besides, such as that the server does not answer; may be empty.
    """
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
        return "warn", f"The server works. Soon: {'; '.join(facts['warnings'])}."
    return "good", "Everything is all right."


def tiles(view: View, runs: Sequence[TableRow], now: float | None = None) -> dict[str, str]:
    """Returns the figures of the server; `now` is in seconds since 1970, by default the current time."""
    now = time.time() if now is None else now
    facts, lists = view.facts, view.lists
    used = sum(row["engine"] for row in lists["queue"])
    states = Counter(_without_details(row["status"]) for row in runs)
    expiring = min(lists["certificates"], key=lambda row: str(row["expires"]), default=None)
    return {
        _ENGINES: f"{used} of {facts['engines_at_once']} at work" if facts["serves"] else UNKNOWN,
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
