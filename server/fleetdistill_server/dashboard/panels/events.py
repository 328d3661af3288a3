"""The events of a run, filtered by kind and text where they are read."""

from __future__ import annotations

from nicegui import ui

from fleetdistill_server.dashboard import table
from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import panel
from fleetdistill_server.dashboard.readers import events
from fleetdistill_server.dashboard.table import LiveTable

ALL = "all kinds"
PAGE, MOST = 200, 1000
"""Number of events shown at first, and after More."""
_COLUMNS = [
    table.time("at", "When (UTC)", minWidth=165, to="second"),
    table.number("round", "Round", minWidth=75),
    table.text("device", "Device", minWidth=120),
    table.text("kind", "Kind", minWidth=130),
    table.text("code", "Code", minWidth=110),
    table.text("text", "What happened", flex=5, minWidth=300, wrapText=True, autoHeight=True),
]


class EventsPanel:
    """A table of the newest events, newest first."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run, self._most = board, run, PAGE
        with panel("Events"):
            with ui.element("div").classes("fd-row"):
                self._kind = ui.select([ALL], value=ALL, label="Kind").props("dense outlined options-dense")
                self._text = ui.input("Text, device or code").props("dense outlined clearable debounce=300")
                self._text.classes("fd-filter")
                self._count = ui.label("Loading …").props("role=status")
                self._more = ui.button(f"Show up to {MOST:,}", on_click=self._show_more).props("flat dense no-caps")
                self._more.set_visibility(False)
            empty = "No event fits the filter. Events are recorded when something is refused, late or unusual."
            self._table = LiveTable("Events of the run", _COLUMNS, empty, "34rem", first=("text", "at"))

    def update(self) -> None:
        """Shows the newest events that fit the filter."""
        kind = "" if self._kind.value == ALL else str(self._kind.value)
        snapshot = self._board.feed.look(events(self._run, kind, self._text.value or "", self._most))
        if snapshot.value is None:
            return
        rows, facts = snapshot.value.lists["events"], snapshot.value.facts
        kinds = [ALL, *facts["kinds"]]
        if self._kind.options != kinds:
            self._kind.set_options(kinds, value=self._kind.value if self._kind.value in kinds else ALL)
        self._count.text = f"{len(rows):,} of {sum(facts['kinds'].values()):,} events shown"
        self._more.set_visibility(facts["more"] and self._most < MOST)
        self._table.show(rows)

    def _show_more(self) -> None:
        self._most = MOST
        self.update()
