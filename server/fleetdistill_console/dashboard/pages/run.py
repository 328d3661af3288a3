"""One run: its progress at the top, and its parts in tabs, of which only the chosen one is read and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nicegui import ui

from fleetdistill_console.dashboard.actions import RunActions
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Notice, Tiles, frame, live
from fleetdistill_console.dashboard.pages.runs import is_at_work
from fleetdistill_console.dashboard.panels.classes import ClassesPanel
from fleetdistill_console.dashboard.panels.curves import CurvesPanel
from fleetdistill_console.dashboard.panels.embed import EmbedPanel
from fleetdistill_console.dashboard.panels.round import RoundPanel
from fleetdistill_console.dashboard.panels.tables import (
    DevicesPanel,
    EventsPanel,
    RoundsPanel,
    SettingsPanel,
    SumsPanel,
    TrafficPanel,
)
from fleetdistill_console.dashboard.readers import RUNS
from fleetdistill_console.dashboard.units import ROUND_SECONDS, UNKNOWN, duration, percent, size
from fleetdistill_server.texts import counted
from fleetdistill_server.views.runs import TableRow


class Panel(Protocol):
    """A part of the page."""

    def update(self) -> None:
        """Shows what has changed."""


TABS: dict[str, Sequence[Callable[[Board, str], Panel]]] = {
    "Overview": (CurvesPanel, RoundPanel),
    "Devices": (DevicesPanel,),
    "Rounds": (RoundsPanel, SumsPanel),
    "Events": (EventsPanel,),
    "Data and bytes": (TrafficPanel, ClassesPanel),
    "Settings": (SettingsPanel,),
    "Add a device": (EmbedPanel,),
}
_STATUS, _PROGRESS, _LEFT = "Status", "Progress", "Time left"
_ACCURACY, _DEVICES, _UP, _DOWN = "Last accuracy", "Devices present", "Received from devices", "Sent to devices"


_BACK = """
addEventListener('popstate', () => emitEvent('tab-in-address', new URLSearchParams(location.search).get('tab') ?? ''));
"""
"""Tells the page which tab the address has once the reader has gone back or forward."""


def show(board: Board, run: str, tab: str = "") -> None:
    """Shows a run and keeps it up to date.

    Args:
        board: What all pages share.
        run: Name of the run.
        tab: The tab, as in the address; empty or unknown for the first.
    """
    with frame(board, run, [("Runs", "/")]):
        notice = Notice()
        with ui.element("div").classes("fd-main-part") as content:
            actions = RunActions(board, run)
            head = Head()
            tabs = Tabs(board, run, tab)

        def update() -> None:
            snapshot = board.feed.look(RUNS)
            notice.show(snapshot)
            if snapshot.value is None:
                return
            row = next((item for item in snapshot.value.lists["runs"] if item["run"] == run), None)
            content.set_visibility(row is not None)
            if row is None:
                notice.fail(f"There is no run {run!r}: it was deleted, or never existed.")
                return
            actions.update(row["status"])
            head.show(row)
            tabs.update()

        live(update)


class Head:
    """The progress of a run as figures and a bar."""

    def __init__(self) -> None:
        names = (_STATUS, _PROGRESS, _LEFT, ROUND_SECONDS, _ACCURACY, _DEVICES, _UP, _DOWN)
        self._reason = ui.label().classes("fd-muted")
        self._tiles = Tiles(names)
        self._bar = ui.linear_progress(0, show_value=False).props('aria-label="Rounds completed" rounded size=8px')

    def show(self, row: TableRow) -> None:
        """Shows a row of the overview."""
        done, wanted = row["completed_rounds"], row["wanted_rounds"]
        self._reason.text = f"{row['status']}: {row['reason']}"
        self._reason.set_visibility(bool(row["reason"]))
        self._bar.set_visibility(bool(wanted))
        self._bar.value = done / wanted if wanted else 0.0
        self._tiles.show(
            {
                _STATUS: row["status"],
                _PROGRESS: f"{done} of {counted(wanted, 'round')}" if wanted else counted(done, "round"),
                _LEFT: time_left(row),
                ROUND_SECONDS: duration(row["round_seconds"]),
                _ACCURACY: last_accuracy(row),
                _DEVICES: f"{row['present']:,} of {row['devices']:,} registered",
                _UP: size(row["bytes_up"]),
                _DOWN: size(row["bytes_down"]),
            }
        )


def time_left(row: TableRow) -> str:
    """Returns the estimated time until a run is finished."""
    if not is_at_work(row) or row["seconds_left"] is None:
        return UNKNOWN
    return f"about {duration(row['seconds_left'])}"


def last_accuracy(row: TableRow) -> str:
    """Returns the newest accuracy and whose it is: the fleet's, else one that the method measured, else the global."""
    known = {"fleet": row["test_accuracy"], **row["method_accuracies"], "global model": row["global_accuracy"]}
    result = ((name.lower(), rate) for name, rate in known.items() if rate is not None)
    name, rate = next(result, ("", None))
    return f"{percent(rate)} ({name})" if name else UNKNOWN


class Tabs:
    """The tabs of a run's page and the panels of the chosen one, which is in the page's address."""

    def __init__(self, board: Board, run: str, tab: str) -> None:
        self._board, self._run = board, run
        self._in_address = _named(tab)
        self._panels: list[Panel] = []
        self._tabs = tabs = ui.tabs(on_change=lambda event: self._open(str(event.value))).classes("fd-tabs")
        tabs.props("no-caps align=left dense outside-arrows").props('aria-label="Parts of the run"')
        with tabs:
            for name in TABS:
                ui.tab(name)
        self._box = ui.element("div").classes("fd-main-part").props("role=tabpanel tabindex=-1")
        tabs.value = self._in_address
        ui.on("tab-in-address", lambda event: self._follow(str(event.args)))
        ui.run_javascript(_BACK)

    def update(self) -> None:
        """Shows what has changed in the chosen tab."""
        for panel in self._panels:
            panel.update()

    def _follow(self, tab: str) -> None:
        self._in_address = self._tabs.value = _named(tab)

    def _open(self, name: str) -> None:
        if name != self._in_address:
            self._in_address = name
            ui.navigate.history.push(f"?tab={_in_address(name)}")
        self._box.clear()
        self._box.props["aria-label"] = name
        with self._box:
            self._panels = [make(self._board, self._run) for make in TABS[name]]
        self.update()


def _in_address(name: str) -> str:
    """Returns a tab as in the address, such as `add-a-device`."""
    return name.lower().replace(" ", "-")


def _named(tab: str) -> str:
    """Returns the name of the tab that an address has; of the first for others."""
    return next((name for name in TABS if _in_address(name) == tab), next(iter(TABS)))
