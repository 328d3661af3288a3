"""Tabs of a run that are tables: figures of its rounds, events, settings, devices, and bytes by kind of part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Tiles, device_link, panel
from fleetdistill_console.dashboard.panels.round import newest_asks
from fleetdistill_console.dashboard.readers import events, participants, round_under_way, rounds, settings, traffic
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import setting, size
from fleetdistill_server.views.runs import TableRow

_ROUND_COLUMNS = [
    table.number("round", "Round", width=85, sort="desc", flex=0, pinned="left"),
    table.text("status", "Status", flex=2, minWidth=110, wrapText=True, autoHeight=True),
    table.number("cohort", "Devices asked", minWidth=85),
    table.number("used", "Answers used", minWidth=95),
    table.number("reported", "Answers not used", minWidth=95),
    table.number("guards", "Guards fired", minWidth=80),
    table.number("seconds", "Duration (s)", minWidth=90),
    table.number("train_loss", "Training loss (nats)", minWidth=90),
    table.rate("test_accuracy", "Fleet accuracy", minWidth=95),
]
_LAST_ROUND_COLUMNS = [
    table.rate("global_accuracy", "Global model", minWidth=80),
    table.size("bytes_up", "Received", minWidth=100),
    table.size("bytes_down", "Sent", minWidth=90),
]
_DEVICE_COLUMNS = [
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
_SUMS_NOTE = (
    "Numbers of devices by step. At least q must be in a sum and t give shares; the guarantee counts on m shares of "
    "noise. Not yet reviewed by a cryptographer."
)
_COUNTS = ("up_sent", "down_sent", "up", "down")
_UP, _DOWN, _SAVED = "Received from devices", "Sent to devices", "Saved by compression"
_TRAFFIC_COLUMNS = [
    table.text("kind", "Kind of part", minWidth=130),
    table.size("up_sent", "Received", minWidth=130),
    table.size("down_sent", "Sent", minWidth=130),
    table.size("up", "Received, uncompressed", minWidth=130),
    table.size("down", "Sent, uncompressed", minWidth=130),
    table.rate("share", "Share of all bytes", minWidth=130, sort="desc"),
]


def method_columns(figures: Mapping[str, TableRow]) -> list[dict[str, Any]]:
    """Returns a column for each figure that a method declares, given as in the view `settings`."""
    kinds = {"accuracy": table.rate, "": table.number}
    return [
        (table.text if figure["of"] in ("devices", "counts") else kinds[figure["unit"]])(
            name, figure["label"], minWidth=95
        )
        for name, figure in figures.items()
    ]


class RoundsPanel:
    """A table of all rounds, newest first."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._figures: Mapping[str, TableRow] = {}
        with panel("Rounds"):
            self._box = ui.element("div")
        self._table = self._make_table()

    def _make_table(self) -> LiveTable:
        columns = [*_ROUND_COLUMNS, *method_columns(self._figures), *_LAST_ROUND_COLUMNS]
        with self._box:
            return LiveTable("Rounds of the run", columns, "No round has begun.", "34rem")

    def update(self) -> None:
        """Shows the newest rounds, with the figures of the run's method once these are known."""
        figures = self._board.method_figures(self._run)
        if figures != self._figures:
            self._figures = figures
            self._box.clear()
            self._table = self._make_table()
        rows = self._board.feed.look(rounds(self._run)).value
        if rows is not None:
            self._table.show([{**row, "id": row["round"]} for row in rows])


_SUM_COLUMNS = [
    table.number("round", "Round", width=85, sort="desc", flex=0, pinned="left", filter=False),
    table.number("sum", "Sum", minWidth=60, filter=False),
    table.text("status", "Status", flex=3, minWidth=150, filter=False, wrapText=True, autoHeight=True),
    table.number("asked", "Asked", minWidth=70, filter=False),
    table.number("keys", "Keys", minWidth=65, filter=False),
    table.number("boxes", "Boxes", minWidth=70, filter=False),
    table.number("inputs", "Inputs", minWidth=70, filter=False),
    table.number("shares", "Shares", minWidth=75, filter=False),
    table.number("min_devices", "q", minWidth=50, filter=False),
    table.number("threshold", "t", minWidth=50, filter=False),
    table.number("noise_shares", "m", minWidth=50, filter=False),
    table.text("dropped", "Dropped out", flex=3, minWidth=150, filter=False, wrapText=True, autoHeight=True),
    table.number("seconds", "Duration (s)", minWidth=85, filter=False),
    table.size("bytes_up", "Received", minWidth=90, filter=False),
    table.size("bytes_down", "Sent", minWidth=70, filter=False),
]


class SumsPanel:
    """A table of the run's secure sums, newest first; not shown for a run without any."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with ui.element("div") as self._box, panel("Secure sums"):
            ui.label(_SUMS_NOTE).classes("fd-muted")
            self._table = LiveTable("Secure sums of the run", _SUM_COLUMNS, "No sum has been tried.", "24rem")
        self._box.set_visibility(False)

    def update(self) -> None:
        """Shows the sums of the rounds that have ended."""
        read = self._board.feed.look(rounds(self._run)).value or ()
        rows = [{**one, "id": f"{one['round']}/{one['sum']}"} for row in read for one in row["secure_sums"]]
        self._box.set_visibility(bool(rows))
        self._table.show(rows)


ALL = "all kinds"
PAGE, MOST = 200, 1000
"""Number of events shown at first, and after More."""
_EVENT_COLUMNS = [
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
        self._board = board
        self._run = run
        self._most = PAGE
        with panel("Events"):
            with ui.element("div").classes("fd-row"):
                self._kind = ui.select([ALL], value=ALL, label="Kind").props("dense outlined options-dense")
                self._text = ui.input("Text, device or code").props("dense outlined clearable debounce=300")
                self._text.classes("fd-filter")
                self._count = ui.label("Loading …").props("role=status")
                self._more = ui.button(f"Show up to {MOST:,}", on_click=self._show_more).props("flat dense no-caps")
                self._more.set_visibility(False)
            empty = "No event fits the filter. Events are recorded when something is refused, late or unusual."
            self._table = LiveTable("Events of the run", _EVENT_COLUMNS, empty, "34rem", first=("text", "at"))

    def update(self) -> None:
        """Shows the newest events that fit the filter."""
        kind = "" if self._kind.value == ALL else str(self._kind.value)
        snapshot = self._board.feed.look(events(self._run, kind, self._text.value or "", self._most))
        if snapshot.value is None:
            return
        rows = snapshot.value.lists["events"]
        facts = snapshot.value.facts
        kinds = [ALL, *facts["kinds"]]
        if self._kind.options != kinds:
            self._kind.set_options(kinds, value=self._kind.value if self._kind.value in kinds else ALL)
        self._count.text = f"{len(rows):,} of {sum(facts['kinds'].values()):,} events shown"
        self._more.set_visibility(facts["more"] and self._most < MOST)
        self._table.show(rows)

    def _show_more(self) -> None:
        self._most = MOST
        self.update()


class SettingsPanel:
    """A list of settings for each section of run.toml."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._shown: object = None
        with panel("Settings"):
            ui.label("As in run.toml, with the defaults of settings that it does not contain.").classes("fd-muted")
            self._box = ui.element("div").classes("fd-columns")

    def update(self) -> None:
        """Shows the settings if they have changed."""
        view = self._board.feed.look(settings(self._run)).value
        if view is None or view == self._shown:
            return
        self._shown = view
        self._box.clear()
        with self._box:
            for section, values in sections(view.facts["settings"]).items():
                _draw_section(section, values)


def sections(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings by section; those outside of a section are under an empty name."""
    single = {name: value for name, value in values.items() if not isinstance(value, dict)}
    return {**({"": single} if single else {}), **{name: one for name, one in values.items() if isinstance(one, dict)}}


def _draw_section(section: str, values: dict[str, Any]) -> None:
    with ui.element("table").classes("fd-settings"):
        with ui.element("caption"):
            ui.label(f"[{section}]" if section else "top level")
        for name, value in values.items():
            with ui.element("tr"):
                with ui.element("th").props("scope=row"):
                    ui.label(name)
                with ui.element("td"):
                    ui.label(setting(value))


class DevicesPanel:
    """A table of all devices."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Devices"):
            search = ui.input("Filter devices", placeholder="id, state or model").props("dense outlined clearable")
            search.classes("fd-filter")
            empty = "No device has checked in yet. The tab Add a device has the lines for an app."
            self._table = LiveTable("Devices of the run", _DEVICE_COLUMNS, empty, "34rem")
            search.on_value_change(lambda event: self._table.filter(event.value or ""))

    def update(self) -> None:
        """Shows the newest rows."""
        view = self._board.feed.look(participants(self._run)).value
        asked = self._board.feed.look(round_under_way(self._run)).value
        if view is not None and asked is not None:
            states = {ask["device"]: ask["state"] for ask in newest_asks(asked.lists["asks"])}
            self._table.show(
                [_device_cells(self._run, row, states.get(row["device"], "")) for row in view.lists["devices"]]
            )


def presence(row: TableRow) -> str:
    """Returns whether a device is there, in a word."""
    if row["revoked"]:
        return "revoked"
    if row["forgotten"]:
        return "forgotten" if row["forgotten"] != "asked" else "to be forgotten"
    return "present" if row["present"] else "away"


def _device_cells(run: str, row: TableRow, state: str) -> dict[str, Any]:
    shown = {"presence": presence(row), "state": state, "answered": f"{row['answers']:,} of {row['asks']:,}"}
    return {**row, "id": row["device"], "link": device_link(run, row["device"]), **shown}


class TrafficPanel:
    """Totals, and a table with a row for each kind of part."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Bytes by kind"):
            self._tiles = Tiles((_UP, _DOWN, _SAVED))
            self._table = LiveTable("Bytes by kind of part", _TRAFFIC_COLUMNS, "Nothing has been sent yet.", "20rem")

    def update(self) -> None:
        """Shows the newest counts."""
        rows = self._board.feed.look(traffic(self._run)).value
        if rows is None:
            return
        kinds = by_kind(rows)
        total = {name: sum(row[name] for row in kinds) for name in _COUNTS}
        saved = total["up"] + total["down"] - total["up_sent"] - total["down_sent"]
        shown = {_UP: size(total["up_sent"]), _DOWN: size(total["down_sent"]), _SAVED: size(max(saved, 0))}
        self._tiles.show(shown)
        self._table.show(kinds)


def by_kind(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Returns the sums over rounds by kind of part, with the kind's share of all bytes on the link."""
    sums: defaultdict[str, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(_COUNTS, 0))
    for row in rows:
        for name in _COUNTS:
            sums[row["kind"]][name] += row[name]
    sent = sum(item["up_sent"] + item["down_sent"] for item in sums.values())
    return [
        {"id": kind, "kind": kind, **one, "share": (one["up_sent"] + one["down_sent"]) / sent if sent else None}
        for kind, one in sums.items()
    ]
