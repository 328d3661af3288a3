"""Charts of series that grow: drawn as SVG in the colours of the page's theme, and sent again only if they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

Point = tuple[float, float]
MAX_POINTS = 400
"""Largest number of points sent of a series; more cannot be told apart on a screen."""
Series = Mapping[str, Sequence[Point]]
_COLOURS = [f"var(--fd-{number})" for number in range(1, 7)]
_PERCENT_AXIS = {
    ":min": "value => value.min === value.max ? 0 : null",
    ":max": "value => value.min === value.max || value.max + 0.3 * (value.max - value.min) > 100 ? 100 : null",
}
"""Ends of an axis in percent: it never goes beyond 100, and has all of them for a single value.

ECharts chooses an end, for null, up to 0.3 times the values' range beyond the largest one.
"""
_DASHES = ["solid", "dashed", "dotted"]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Returns at most `most` points of a series: the lowest and the highest of each stretch, and the last one.

    Peaks therefore stay visible.
    """
    if len(points) <= most:
        return list(points)
    stretch = -(-len(points) // ((most - 1) // 2))
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


class Curves:
    """Curves over a common axis, with a legend and a sentence for screen readers.

    Args:
        label: What the chart shows, such as "Accuracy".
        unit: Unit of the values, shown at the axis: "%" or another unit.
        height: Height as CSS.
    """

    def __init__(self, label: str, unit: str, height: str = "19rem") -> None:
        self._label, self._unit = label, unit
        self._shown: object = None
        self._chart = ui.echart(self._options(), renderer="svg").classes("fd-chart").style(f"height: {height}")
        self._chart.props("role=img")
        self._empty = ui.label().classes("fd-empty")

    def show(self, series: Series, x_name: str, x_unit: str, empty: str) -> None:
        """Shows series; sends them only if they differ from those shown.

        Args:
            series: Points by name of the series, each in the order of x.
            x_name: Name of the axis of x.
            x_unit: Unit of x, empty for a number.
            empty: Text shown if no series has a point.
        """
        filled = {name: thin(points) for name, points in series.items() if points}
        if (filled, x_name, x_unit) == self._shown:
            return
        self._shown = filled, x_name, x_unit
        self._empty.text = empty
        self._empty.set_visibility(not filled)
        self._chart.set_visibility(bool(filled))
        self._chart.props["aria-label"] = self._sentence(filled, x_name, x_unit)
        self._chart.options["xAxis"]["minInterval"] = 0 if x_unit else 1  # rounds are whole numbers
        self._chart.options["xAxis"]["name"] = f"{x_name} ({x_unit})" if x_unit else x_name
        self._chart.options["series"] = [
            _line(name, points, number) for number, (name, points) in enumerate(filled.items())
        ]
        self._chart.update()

    def _sentence(self, series: Series, x_name: str, x_unit: str) -> str:
        if not series:
            return self._label
        last = [f"{name} {points[-1][1]:.4g} {self._unit}".strip() for name, points in series.items()]
        at = max(points[-1][0] for points in series.values())
        return f"{self._label} by {x_name}: {', '.join(last)} at {at:,.4g} {x_unit}".strip()

    def _options(self) -> dict[str, Any]:
        text = {"color": "var(--fd-muted)"}
        line = {"lineStyle": {"color": "var(--fd-line)"}}
        unit = f" {self._unit}" if self._unit else ""
        return {
            "animation": False,
            "color": _COLOURS,
            "grid": {"left": 8, "right": 24, "top": 52, "bottom": 30, "containLabel": True},
            "legend": {
                "type": "scroll",
                "top": 0,
                "left": 0,
                "icon": "roundRect",
                "textStyle": {"color": "var(--fd-text)"},
            },
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "backgroundColor": "var(--fd-panel)",
                "borderColor": "var(--fd-line)",
                "textStyle": {"color": "var(--fd-text)"},
                ":valueFormatter": f"value => (+value.toPrecision(4)).toLocaleString('en-US') + {unit!r}",
            },
            "xAxis": {
                "type": "value",
                "nameLocation": "middle",
                "nameGap": 28,
                "nameTextStyle": text,
                "axisLabel": text,
                "axisLine": line,
                "splitLine": {"show": False},
                ":min": "value => value.min === value.max ? value.min - 1 : value.min",
                "max": "dataMax",
            },
            "yAxis": {
                "type": "value",
                "name": f"{self._label} ({self._unit})",
                "nameTextStyle": {**text, "align": "left"},
                "nameGap": 12,
                "axisLabel": text,
                "splitLine": line,
                "scale": True,
                **(_PERCENT_AXIS if self._unit == "%" else {}),
            },
            "series": [],
        }


class AccuracyAndLoss:
    """Two charts side by side; a sentence in their place while neither has a figure."""

    def __init__(self, loss: str = "Loss") -> None:
        self._empty = ui.label().classes("fd-empty")
        with ui.element("div").classes("fd-columns") as self._box:
            with ui.element("div"):
                self._accuracy = Curves("Accuracy", "%")
            with ui.element("div"):
                self._loss = Curves(loss, "nats")

    def show(self, accuracy: Series, loss: Series, x_name: str, x_unit: str, empty: str) -> None:
        """Shows both as `Curves.show` does; `empty` is shown once, or in place of the chart without figures."""
        filled = any(accuracy.values()) or any(loss.values())
        self._empty.text = empty
        self._empty.set_visibility(not filled)
        self._box.set_visibility(filled)
        self._accuracy.show(accuracy, x_name, x_unit, empty)
        self._loss.show(loss, x_name, x_unit, empty)


def _line(name: str, points: Sequence[Point], number: int) -> dict[str, Any]:
    """Returns a series of a chart; its dashes tell it apart without its colour."""
    return {
        "type": "line",
        "name": name,
        "data": [list(point) for point in points],
        "showSymbol": len(points) < 30,
        "symbolSize": 5,
        "lineStyle": {"width": 2, "type": _DASHES[number % len(_DASHES)]},
        "emphasis": {"disabled": True},
    }
