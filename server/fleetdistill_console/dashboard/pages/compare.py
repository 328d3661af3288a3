"""Up to five runs side by side: final figures, curves over a common axis, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlencode

from nicegui import ui

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.chart import AccuracyAndLoss, Point
from fleetdistill_console.dashboard.layout import Notice, frame, live, panel, run_link
from fleetdistill_console.dashboard.panels.curves import ACCURACIES, AXES, accuracies_of, positions, scale
from fleetdistill_console.dashboard.readers import RUNS, rounds, settings
from fleetdistill_console.dashboard.units import ROUND_SECONDS, UNKNOWN, duration, percent, setting, size
from fleetdistill_server.views.runs import TableRow

MAX_RUNS = 5
_LOSS = "train_loss"


def show(board: Board, names: Sequence[str]) -> None:
    """Shows runs side by side.

    Args:
        board: What all pages share.
        names: Names of the runs, from the address; those after the fifth are left out.
    """
    chosen = list(dict.fromkeys(names))[:MAX_RUNS]
    with frame(board, "Compare", [("Runs", "/")]):
        notice = Notice()
        choice = _Choice(chosen)
        if len(set(names)) > MAX_RUNS:
            ui.label(f"Only the first {MAX_RUNS} runs are shown.").props("role=status").classes("fd-muted")
        parts: list[_Part] = [make(board, chosen) for make in (_Figures, _Compared, _Differences)] if chosen else []

        def update() -> None:
            snapshot = board.feed.look(RUNS)
            notice.show(snapshot)
            if snapshot.value is None:
                return
            known = [row["run"] for row in snapshot.value.lists["runs"]]
            choice.offer(known)
            missing = [name for name in chosen if name not in known]
            if missing and not snapshot.error:
                notice.fail(f"There is no run {' or '.join(map(repr, missing))}: it was deleted, or never existed.")
            for part in parts:
                part.update()

        live(update)


class _Part(Protocol):
    def update(self) -> None: ...


class _Choice:
    """Chooses the runs; the choice is in the page's address, so that it can be shared."""

    def __init__(self, chosen: list[str]) -> None:
        self._select = ui.select(chosen, value=chosen, multiple=True, label=f"Runs, at most {MAX_RUNS}")
        self._select.props(f"dense outlined use-chips options-dense max-values={MAX_RUNS}").classes("fd-filter")
        self._select.on("popup-hide", self._go)
        self._select.on("remove", self._go)
        self._chosen = chosen
        self._empty = ui.label("Choose runs to compare them.").classes("fd-empty")
        self._empty.set_visibility(not chosen)

    def offer(self, known: list[str]) -> None:
        """Offers runs, newest first."""
        options = list(dict.fromkeys([*reversed(known), *self._chosen]))
        if options != self._select.options:
            self._select.set_options(options, value=self._select.value)

    def _go(self) -> None:
        if list(self._select.value) != self._chosen:
            ui.navigate.to("/compare?" + urlencode({"runs": ",".join(self._select.value)}, safe=","))


class _Figures:
    """The last figures of each run, a column for each."""

    def __init__(self, board: Board, names: list[str]) -> None:
        self._board = board
        with panel("Figures"):
            self._table = _SideBySide(names, "Figures of the runs", linked=True)

    def update(self) -> None:
        """Shows what has changed."""
        view = self._board.feed.look(RUNS).value
        if view is not None:
            self._table.show(side_by_side({row["run"]: figures(row) for row in view.lists["runs"]}))


class _Compared:
    """Accuracy and loss of the runs over a common axis."""

    def __init__(self, board: Board, names: list[str]) -> None:
        self._board, self._names = board, names
        with panel("Accuracy and loss"):
            with ui.element("div").props('role=group aria-label="What is drawn"').classes("fd-row"):
                ui.label("Against").classes("fd-muted")
                self._axis = ui.toggle(list(AXES), value=AXES[0], on_change=self.update).props("dense no-caps")
                self._whose = ui.select(ACCURACIES, value=next(iter(ACCURACIES)), label="Accuracy of")
                self._whose.props("dense outlined options-dense").on_value_change(self.update)
            self._charts = AccuracyAndLoss("Training loss")

    def update(self) -> None:
        """Shows what has changed."""
        accuracies = {**ACCURACIES}
        for name in self._names:
            accuracies |= accuracies_of(self._board.method_figures(name))
        if accuracies != self._whose.options:
            self._whose.set_options(accuracies, value=self._whose.value)
        read = {name: self._board.feed.look(rounds(name)).value for name in self._names}
        ended = {name: [row for row in rows or () if row["ended_at"] is not None] for name, rows in read.items()}
        waits = "None of these runs has this figure yet."
        accuracy, x_name, x_unit = drawn(ended, str(self._axis.value), str(self._whose.value), 100)
        loss, _, _ = drawn(ended, str(self._axis.value), _LOSS, 1)
        self._charts.show(accuracy, loss, x_name, x_unit, waits)


class _Differences:
    """The settings in which the runs differ."""

    def __init__(self, board: Board, names: list[str]) -> None:
        self._board, self._names = board, names
        with panel("Settings that differ"):
            self._table = _SideBySide(names, "Settings that differ")
            self._same = ui.label().props("role=status").classes("fd-muted")

    def update(self) -> None:
        """Shows what has changed."""
        views = {name: self._board.feed.look(settings(name)).value for name in self._names}
        known = {name: view.facts["settings"] for name, view in views.items() if view is not None}
        differ = differing(known)
        self._table.show(differ)
        self._same.text = "" if differ or not known else "These runs have the same settings."


class _SideBySide:
    """A table with a row for each name and a column for each run."""

    def __init__(self, names: list[str], caption: str, linked: bool = False) -> None:
        self._names = names
        self._shown: Mapping[str, Mapping[str, str]] | None = None
        with ui.element("div").classes("fd-wide"), ui.element("table").classes("fd-compare") as self._table:
            self._table.props["aria-label"] = caption
            with ui.element("thead"), ui.element("tr"):
                with ui.element("th").props("scope=col"):
                    ui.label("Name").classes("fd-hidden")
                for name in names:
                    with ui.element("th").props("scope=col"):
                        ui.link(name, run_link(name)) if linked else ui.label(name)
            self._body = ui.element("tbody")

    def show(self, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Shows texts by row and run; draws them again only if they have changed."""
        if rows == self._shown:
            return
        self._shown = rows
        self._table.set_visibility(bool(rows))
        self._body.clear()
        with self._body:
            for heading, cells in rows.items():
                with ui.element("tr"):
                    with ui.element("th").props("scope=row"):
                        ui.label(heading)
                    for name in self._names:
                        with ui.element("td"):
                            ui.label(cells.get(name, UNKNOWN))


def figures(row: TableRow) -> dict[str, str]:
    """Returns the last figures of a run of the overview, with their units."""
    wanted = row["wanted_rounds"]
    return {
        "Method": row["method"],
        "Status": row["status"],
        "Rounds completed": f"{row['completed_rounds']:,} of {wanted:,}" if wanted else f"{row['completed_rounds']:,}",
        "Accuracy, fleet": percent(row["test_accuracy"]),
        **{label: percent(rate) for label, rate in row["method_accuracies"].items()},
        "Accuracy, global model": percent(row["global_accuracy"]),
        ROUND_SECONDS: duration(row["round_seconds"]),
        "Received from devices": size(row["bytes_up"]),
        "Sent to devices": size(row["bytes_down"]),
        "Devices": f"{row['devices']:,}",
        "Created (UTC)": row["created"],
    }


def side_by_side(by_run: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Turns texts by run and name into texts by name and run."""
    names = dict.fromkeys(name for texts in by_run.values() for name in texts)
    return {name: {run: texts[name] for run, texts in by_run.items() if name in texts} for name in names}


def drawn(
    ended: Mapping[str, Sequence[TableRow]], axis: str, figure: str, factor: float
) -> tuple[dict[str, list[Point]], str, str]:
    """Returns the points of each run over an axis that all runs share, and the axis' name and unit.

    Args:
        ended: The ended rounds of each run, in order.
        axis: One of `AXES`.
        figure: Column of the rounds that is drawn.
        factor: Factor of its values.
    """
    places = {name: positions(axis, rows) for name, rows in ended.items()}
    x_name, x_unit, one = scale(axis, max((max(xs, default=0) for xs in places.values()), default=0))
    return (
        {
            name: [
                (round(x / one, 4), round(factor * row[figure], 4))
                for x, row in zip(places[name], rows, strict=True)
                if row.get(figure) is not None
            ]
            for name, rows in ended.items()
        },
        x_name,
        x_unit,
    )


def differing(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns the settings whose values are not the same in all runs, by name and run; lists are one value."""
    flat = {run: dict(_flat(values)) for run, values in settings.items()}
    names = dict.fromkeys(name for values in flat.values() for name in values)
    texts = {name: {run: values.get(name, "not set") for run, values in flat.items()} for name in names}
    return {name: by_run for name, by_run in texts.items() if len(set(by_run.values())) > 1}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    result = []
    for name, value in values.items():
        if isinstance(value, dict):
            result += _flat(value, f"{prefix}{name}.")
        else:
            result.append((f"{prefix}{name}", setting(value)))
    return result
