"""Accuracy and loss of a run by rounds, bytes or time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from nicegui import ui

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.chart import AccuracyAndLoss, Point
from fleetdistill_console.dashboard.layout import panel
from fleetdistill_console.dashboard.readers import rounds
from fleetdistill_server.views.runs import TableRow

ACCURACIES = {
    "test_accuracy": "Fleet, mean of the devices",
    "alone_accuracy": "Devices alone",
    "global_accuracy": "Global model",
}
LOSSES = {"train_loss": "Fleet, training"}
AXES = ("Rounds", "Bytes", "Time")
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((172_800, 86_400, "days"), (7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))


class CurvesPanel:
    """Two charts, and a switch for what their figures are drawn against."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Accuracy and loss"):
            with ui.element("div").props('role=group aria-label="Draw against"').classes("fd-row"):
                ui.label("Against").classes("fd-muted")
                self._axis = ui.toggle(list(AXES), value=AXES[0], on_change=self.update).props("dense no-caps")
            self._charts = AccuracyAndLoss()

    def update(self) -> None:
        """Shows the newest rounds."""
        rows = self._board.feed.look(rounds(self._run)).value
        if rows is None:
            return
        ended = [row for row in rows if row["ended_at"] is not None]
        x_name, x_unit, xs = axis(str(self._axis.value), ended)
        waits = "Shown once a round is complete and devices whose apps allow metrics have reported it."
        accuracies = ACCURACIES | accuracies_of(self._board.method_figures(self._run))
        accuracy = _series(accuracies, ended, xs, lambda rate: 100 * rate)
        self._charts.show(accuracy, _series(LOSSES, ended, xs, lambda loss: loss), x_name, x_unit, waits)


def accuracies_of(figures: Mapping[str, TableRow]) -> dict[str, str]:
    """Returns the labels of the accuracies among the figures that a method declares, by name."""
    return {name: figure["label"] for name, figure in figures.items() if figure["unit"] == "accuracy"}


def _series(
    names: dict[str, str], rows: Sequence[TableRow], xs: Sequence[float], convert: Callable[[float], float]
) -> dict[str, list[Point]]:
    return {
        shown: [
            (round(x, 4), round(convert(row[name]), 4))
            for x, row in zip(xs, rows, strict=True)
            if row.get(name) is not None
        ]
        for name, shown in names.items()
    }


def axis(name: str, rows: Sequence[TableRow]) -> tuple[str, str, list[float]]:
    """Returns what rounds are drawn against: the axis' name, its unit, and a number for each round.

    Args:
        name: One of `AXES`.
        rows: Rounds that have ended, in order.
    """
    result = positions(name, rows)
    x_name, unit, one = scale(name, max(result, default=0))
    return x_name, unit, [position / one for position in result]


def positions(name: str, rows: Sequence[TableRow]) -> list[float]:
    """Returns for each round its number, the bytes until its end, or the seconds until its end."""
    if name == "Bytes":
        return list(accumulate(row["bytes_up"] + row["bytes_down"] for row in rows))
    if name == "Time":
        return [row["ended_at"] - rows[0]["started_at"] for row in rows]
    return [row["round"] for row in rows]


def scale(name: str, largest: float) -> tuple[str, str, float]:
    """Returns the name and the unit of an axis up to `largest` bytes or seconds, and how many of them are one unit."""
    if name == "Bytes":
        one, unit = next((found for found in _BYTES if largest >= found[0]), _BYTES[-1])
        return "sent and received by the fleet", unit, one
    if name == "Time":
        _, one, unit = next(found for found in _SECONDS if largest >= found[0])
        return "time since the first round began", unit, one
    return "round", "", 1
