"""The classes of the devices' data as bubbles, whose areas are numbers of samples, as in a simulation's picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import panel
from fleetdistill_console.dashboard.readers import classes
from fleetdistill_console.dashboard.units import natural
from fleetdistill_server.views.runs import TableRow

MAX_DEVICES = 60
"""Largest number of devices in the picture, as in that of a simulation."""
_DATA = {"train": "training data", "test": "test data"}
_LARGEST = 26.0
"""Diameter in pixels of the largest bubble."""
_TOOLTIP = """item => Object.assign(document.createElement('span'), {
  textContent: `class ${item.name}: ${item.value[2].toLocaleString('en-US')} samples`
})"""
"""An element with a text: ECharts shows a string as HTML, and devices and operators choose the names of classes."""


class ClassesPanel:
    """A row of bubbles for each device whose app allows its counts to be known."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._shown: object = None
        with panel("Classes by device"):
            self._note = ui.label("Loading …").classes("fd-muted")
            self._chart = ui.echart(_options(), renderer="svg").classes("fd-chart").props("role=img")
            self._chart.set_visibility(False)

    def update(self) -> None:
        """Shows the counts if they have changed."""
        view = self._board.feed.look(classes(self._run)).value
        if view is None or view == self._shown:
            return
        self._shown = view
        devices = sorted(view.lists["devices"], key=lambda row: natural(row["device"]))
        names = [str(item) for item in view.facts["classes"]]
        rows = spread(devices, MAX_DEVICES)
        self._note.text = note(rows, len(devices))
        self._chart.set_visibility(bool(rows))
        if rows:
            self._chart.style(f"height: {5 + 1.7 * len(rows):.1f}rem")
            self._chart.props["aria-label"] = _sentence(rows, names)
            self._chart.options["xAxis"]["data"] = names
            self._chart.options["yAxis"]["data"] = [str(row["device"]) for row in rows]
            self._chart.options["series"] = [_bubbles(rows, names), totals(rows, names)]
            self._chart.update()


def spread(devices: Sequence[TableRow], most: int) -> list[TableRow]:
    """Returns at most `most` devices, evenly spread over all."""
    if len(devices) <= most:
        return list(devices)
    return [devices[number * len(devices) // most] for number in range(most)]


def note(shown: Sequence[TableRow], known: int) -> str:
    """Returns what the picture shows, or why there is none."""
    if not shown:
        return "Not known: no device has answered whose app allows the number of samples of each class (counts)."
    splits = " and ".join(sorted({_DATA.get(row["split"], "data") for row in shown}))
    text = f"The area of a bubble is the number of samples in the {splits}; totals are on the right."
    return text if len(shown) == known else f"{text} {len(shown)} of {known:,} devices, evenly spread."


def bubbles(rows: Sequence[TableRow], names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Returns class, device and number of samples of each bubble."""
    return [
        (column, line, int(row["counts"][str(column)]))
        for line, row in enumerate(rows)
        for column in range(len(names))
        if row["counts"].get(str(column))
    ]


def _bubbles(rows: Sequence[TableRow], names: Sequence[str]) -> dict[str, Any]:
    result = bubbles(rows, names)
    largest = max((count for *_, count in result), default=1)
    return {
        "type": "scatter",
        "data": [list(item) for item in result],
        ":symbolSize": f"value => {_LARGEST} * Math.sqrt(value[2] / {largest})",
        "itemStyle": {"color": "var(--fd-1)", "opacity": 0.75},
        "emphasis": {"disabled": True},
    }


def totals(rows: Sequence[TableRow], names: Sequence[str]) -> dict[str, Any]:
    """Returns the devices' numbers of samples as texts to the right of the last class."""
    shown = {"show": True, "position": "right", "distance": 30, "color": "var(--fd-text)"}
    return {
        "type": "scatter",
        "data": [[len(names) - 1, line, sum(row["counts"].values())] for line, row in enumerate(rows)],
        "symbolSize": 0.1,
        "silent": True,
        "label": {**shown, ":formatter": "item => item.value[2].toLocaleString('en-US')"},
        "itemStyle": {"color": "transparent"},
    }


def _sentence(rows: Sequence[TableRow], names: Sequence[str]) -> str:
    total = sum(sum(row["counts"].values()) for row in rows)
    return f"Samples by class: {len(rows)} devices have {total:,} samples of {len(names)} classes"


def _options() -> dict[str, Any]:
    grid = {"show": True, "lineStyle": {"color": "var(--fd-line)"}}
    common = {"type": "category", "axisTick": {"show": False}, "axisLine": {"show": False}, "splitLine": grid}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 80, "top": 10, "bottom": 34, "containLabel": True},
        "tooltip": {
            "confine": True,
            "backgroundColor": "var(--fd-panel)",
            "borderColor": "var(--fd-line)",
            "textStyle": {"color": "var(--fd-text)"},
            ":formatter": _TOOLTIP,
        },
        "xAxis": {
            **common,
            "name": "class",
            "nameLocation": "middle",
            "nameGap": 26,
            "nameTextStyle": {"color": "var(--fd-muted)"},
            "axisLabel": {"color": "var(--fd-muted)", "hideOverlap": True},
            "data": [],
        },
        "yAxis": {
            **common,
            "inverse": True,
            "axisLabel": {"color": "var(--fd-text)", "width": 170, "overflow": "truncate", "interval": 0},
            "data": [],
        },
        "series": [],
    }
