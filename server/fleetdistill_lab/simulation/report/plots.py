"""Plots for a simulation's report: the partition of the data, and accuracy by bytes.

matplotlib is imported on use and without pyplot, which would need a window system and keep a list of open figures.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.names import unknown_name
from fleetdistill_lab.simulation.report.comparison import Curve
from fleetdistill_lab.simulation.report.device_plots import (
    ALONE,
    CONTROL_STYLES,
    FEDAVG,
    FLEET,
    FURTHER,
    GREY,
    DeviceCurves,
    plot_gains,
    plot_rounds,
    show_percent,
)
from fleetdistill_server.texts import readable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = ("png", "pdf", "svg")
"""Types of a report's figure, which are the ends of its file's name."""
PANELS = ("traffic", "rounds", "data", "gains")
"""Panels of a report's figure, from top to bottom; `gains` is beside `data`."""
COLUMN_MM, PAGE_MM = 84, 174
"""Widths of a figure with one chosen panel and with several: a column and a page of a journal."""
_COLOURS = {"FedAvg": FEDAVG, "class statistics": FURTHER}
_STYLES = ("-", "--", "-.")
MAX_ROWS = 18
"""Largest number of devices with a row of their own in a figure."""
MAX_HEIGHT = 2400
"""Largest height of a report's figure, in pixels."""
_MARKERS = ("o", "D", "s")


def load_matplotlib() -> None:
    """Imports matplotlib early, so that an interrupted simulation writes its plot without a delay."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.ticker  # noqa: F401


def plot_partition(
    ax: Axes, counts_jc: npt.ArrayLike, class_names: Sequence[str], device_names: Sequence[str], partition: str
) -> None:
    """Draws a bubble for each device and class, whose area is the number of samples; totals are on the right.

    Args:
        ax: Axes to draw on.
        counts_jc: `[J, C]`, number of device j's samples of each class.
        class_names: Class names, in label order.
        device_names: Names of the devices, in the same order as `counts_jc`.
        partition: Description of the partition, for the title.

    Raises:
        DataError: The number of names does not fit `counts_jc`.
    """
    counts = np.asarray(counts_jc, dtype=np.int64)
    if counts.shape != (len(device_names), len(class_names)):
        text = f"{len(device_names)} device names and {len(class_names)} class names"
        raise DataError(f"{text} for counts of shape {list(counts.shape)}")
    _draw_bubbles(ax, counts)
    _name_axes(ax, counts, class_names, device_names)
    ax.set_title(f"Training data by device\n{partition}", loc="left", wrap=True)


def plot_comparison(ax: Axes, curves: Sequence[Curve], alone: float | None = None, columns: int = 2) -> None:
    """Draws accuracy by bytes on a logarithmic axis.

    A run of several rounds is a curve, a single exchange is a point with a dot for each device, and local-only
    training, which has no traffic, is a horizontal line.

    Args:
        ax: Axes to draw on.
        curves: Curves to compare; those of one method must be adjacent and get the same colour.
        alone: Mean accuracy of local-only training, in [0, 1]; None without this control.
        columns: Number of columns of the legend.

    Raises:
        DataError: There are no curves, or a curve has no rounds, no bytes, or unequal numbers of bytes and accuracies.
    """
    for one in curves:
        if not one.bytes or len(one.bytes) != len(one.accuracy) or one.bytes[0] <= 0:
            text = f"{len(one.accuracy)} accuracies for {len(one.bytes)} counts of bytes"
            raise DataError(f"cannot draw {one.name!r}: {text}; every round needs both, and bytes above 0")
    if not curves:
        raise DataError("cannot plot a comparison without curves; give at least one curve")
    if alone is not None:
        ax.axhline(alone, color=ALONE, linewidth=2, linestyle=":", label=f"alone: {alone:.1%}")
    for one, (colour, number) in zip(curves, _looks(curves), strict=True):
        _draw_curve(ax, one, colour, number)
    _dress_comparison(ax, curves, alone, columns)


def save_report_figure(
    path: str | os.PathLike[str],
    *,
    counts_jc: npt.ArrayLike,
    class_names: Sequence[str],
    device_names: Sequence[str],
    partition: str,
    curves: Sequence[Curve],
    by_device: DeviceCurves,
    alone: float | None = None,
    title: str = "",
    panels: Sequence[str] = (),
) -> Path:
    """Writes plots of a report into one figure, as a PNG of at most `MAX_HEIGHT` pixels, and returns its path.

    From top to bottom: `traffic`, accuracy by bytes (`plot_comparison`); `rounds`, accuracy by round if there are
    several (`plot_rounds`); and a row for each device, or for those of `devices_drawn`, with its `data`
    (`plot_partition`) and its `gains` (`plot_gains`). Text stays text in a PDF, as TrueType fonts, and in an SVG.

    Args:
        path: Path of the file to write, whose suffix is one of `FIGURES`.
        counts_jc: See `plot_partition`.
        class_names: See `plot_partition`.
        device_names: See `plot_partition`.
        partition: See `plot_partition`.
        curves: See `plot_comparison`.
        by_device: See `plot_rounds` and `plot_gains`.
        alone: See `plot_comparison`.
        title: Title of the figure; empty for none.
        panels: Names in `PANELS` of the panels to draw, in a figure as wide as a column of a journal for one and as a
            page for several; empty for all.

    Raises:
        ConfigurationError: The suffix or a panel is unknown.
        DataError: The values do not fit each other, or the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    target = Path(path)
    check_figure(target.suffix[1:], panels)
    width, scale, columns = _layout(panels)
    wanted, heights = panels or PANELS, {}
    if "traffic" in wanted and (alone is not None or any(rate is not None for one in curves for rate in one.accuracy)):
        heights["traffic"] = 4.2 + 0.24 * len(curves) / columns  # with the legend
    if "rounds" in wanted and _are_rounds_scored(by_device):
        heights["rounds"] = 3.9
    has_gains = bool(by_device.final or by_device.alone)
    beside = [name for name in ("data", "gains") if name in wanted and (name == "data" or has_gains)]
    shown = devices_drawn(by_device, len(device_names))
    if beside:
        heights["devices"] = max(3.2, 1.5 + 0.3 * len(shown))
    sizes = [scale * height for height in heights.values()] or [2.0]
    dpi = min(300 if panels else 200, int(MAX_HEIGHT / sum(sizes)))
    with rc_context(_fonts(scale)):
        figure = Figure(figsize=(width, sum(sizes)), dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)  # without pyplot the figure is released when this function returns
        # Separate subfigures, so that long device names do not narrow the curves.
        made: Any = figure.subfigures(len(sizes), 1, squeeze=False, height_ratios=sizes)
        parts = dict(zip(heights, made[:, 0], strict=False))
        if "traffic" in parts:
            plot_comparison(parts["traffic"].subplots(), curves, alone, columns)
        if "rounds" in parts:
            plot_rounds(parts["rounds"].subplots(), by_device)
        if len(shown) < len(device_names):
            order = ", by accuracy" if by_device.final else ""
            partition = f"{partition}\n{len(shown)} of {len(device_names)} devices{order}"
            by_device = by_device.of_rows(shown)
        names = [device_names[row] for row in shown]
        if columns == 1:
            names = [name.partition(" (")[0] for name in names]  # without the models, for which a column is too narrow
        if beside:
            axes = parts["devices"].subplots(1, len(beside), squeeze=False, width_ratios=(2, 1)[: len(beside)])[0]
            if "data" in beside:
                plot_partition(axes[0], np.asarray(counts_jc)[shown], class_names, names, partition)
            if "gains" in beside:
                plot_gains(axes[-1], by_device)
            if "data" not in beside:
                axes[0].set_yticks(range(len(names)), names)
        if not parts:
            figure.text(0.5, 0.5, f"nothing was scored for {' and '.join(wanted)}", ha="center", color=GREY)
        for line in figure.findobj(Line2D):
            line.set(linewidth=scale**2 * line.get_linewidth(), markersize=scale**2 * line.get_markersize())
        if title and not panels:
            figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target, format=target.suffix[1:])
        except OSError as error:
            raise DataError(f"cannot write the figure to {target}: {error}; choose another folder") from error
    return target


def check_figure(kind: str, panels: Sequence[str]) -> None:
    """Checks the type and the panels of a report's figure.

    Raises:
        ConfigurationError: `kind` is not one of `FIGURES`, or a panel not one of `PANELS`.
    """
    if kind not in FIGURES:
        raise ConfigurationError(unknown_name("figure", kind, FIGURES))
    for panel in panels:
        if panel not in PANELS:
            raise ConfigurationError(unknown_name("panel", panel, PANELS))


def _layout(panels: Sequence[str]) -> tuple[float, float, int]:
    """Returns the width in inches, the scale of heights and fonts, and the number of the legend's columns."""
    if not panels:
        return 9.0, 1.0, 2
    return (COLUMN_MM / 25.4, 0.75, 1) if len(set(panels)) == 1 else (PAGE_MM / 25.4, 0.8, 2)


def _fonts(scale: float) -> dict[str, Any]:
    """Returns matplotlib's settings of the fonts, which a file contains as text."""
    sizes = {"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "axes.titlepad": 6, "axes.labelpad": 4}
    return {**{name: scale * size for name, size in sizes.items()}, "pdf.fonttype": 42, "svg.fonttype": "none"}


def devices_drawn(by_device: DeviceCurves, devices: int) -> list[int]:
    """Returns the positions of the devices that get a row, in their order.

    Of too many these are the worst, the best, and those at evenly spaced ranks of final accuracy between them; without
    accuracies they are evenly spaced.
    """
    if devices <= MAX_ROWS:
        return list(range(devices))
    positions = {name: row for row, name in enumerate(by_device.devices)}
    ranked = sorted((rate, positions[name]) for name, rate in by_device.final.items())
    rows = [row for _, row in ranked] or list(range(devices))
    last = min(MAX_ROWS, len(rows)) - 1
    return sorted({rows[round(rank * (len(rows) - 1) / max(last, 1))] for rank in range(last + 1)})


def _are_rounds_scored(by_device: DeviceCurves) -> bool:
    """Returns whether device models were scored, in a run of more than one round."""
    return any(len(rates) > 1 and any(rate is not None for rate in rates) for rates in by_device.devices.values())


def _draw_bubbles(ax: Axes, counts: npt.NDArray[np.int64]) -> None:
    from matplotlib import rcParams

    devices, classes = counts.shape
    ys, xs = np.nonzero(counts)
    sizes = counts[ys, xs]
    points = 72 / ax.figure.dpi
    cell = min(ax.bbox.width * points / classes, ax.bbox.height * points / devices)
    largest = min(28.0, max(10.0, 0.9 * cell))  # in points; above 10 no bubble touches its neighbours
    largest *= rcParams["font.size"] / 10
    ax.scatter(xs, ys, s=largest**2 * sizes / sizes.max(initial=1), color=FLEET, alpha=0.75, linewidths=0)


def _name_axes(
    ax: Axes, counts: npt.NDArray[np.int64], class_names: Sequence[str], device_names: Sequence[str]
) -> None:
    devices, classes = counts.shape
    labels = 25 if ax.bbox.width / ax.figure.dpi > COLUMN_MM / 25.4 else 12
    every = -(-classes // labels)  # with 100 classes, every fourth; in narrow axes every ninth
    long_names = max(len(name) for name in class_names) > 6 or classes > 15
    ax.set_xticks(range(0, classes, every), class_names[::every], rotation=35 if long_names else 0)
    for tick in ax.get_xticklabels():
        tick.set_horizontalalignment("right" if long_names else "center")
    ax.set_yticks(range(devices), device_names)
    ax.set_xlim(-0.6, classes - 0.4)
    ax.set_ylim(devices - 0.4, -0.6)  # the first device on top
    for device, size in enumerate(counts.sum(axis=1)):
        ax.annotate(f"{size:,}", (1.01, device), xycoords=("axes fraction", "data"), va="center", color=GREY)
    ax.annotate("samples", (1.01, 0), (0, -12), xycoords="axes fraction", textcoords="offset points", color=GREY)
    ax.set_xlabel("class")
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)


def _looks(curves: Sequence[Curve]) -> list[tuple[str, int]]:
    """Returns each curve's colour, which its method determines, and its number among the method's curves."""
    seen = Counter[str]()
    result = []
    for curve in curves:
        colour = next((colour for name, colour in _COLOURS.items() if curve.name.startswith(name)), FLEET)
        result.append((colour, seen[colour]))
        seen[colour] += 1
    return result


def _draw_curve(ax: Axes, curve: Curve, colour: str, number: int) -> None:
    scored = [number for number, rate in enumerate(curve.accuracy) if rate is not None]
    if not scored:
        return
    kilobytes = np.array(curve.bytes)[scored] / 1e3
    rates = np.array(curve.accuracy, dtype=np.float64)[scored]
    last = f": {rates[-1]:.1%}" if scored[-1] == len(curve.bytes) - 1 else ""
    label = f"{curve.name}{last} after {readable_bytes(round(curve.bytes[-1]))}"
    marker = _MARKERS[number % len(_MARKERS)]
    if kilobytes[0] < kilobytes[-1]:
        look: dict[str, Any] = {"linestyle": _style(curve, number), "linewidth": 2.5, "color": colour}
        end: dict[str, Any] = {
            "marker": marker,
            "markevery": [-1],
            "markersize": 8,
            "markerfacecolor": "white",
        }  # a curve with a single known accuracy is drawn as this marker only
        ax.plot(kilobytes, rates, label=label, **look, **end)
        return
    xs = np.full(len(curve.devices), kilobytes[-1])
    ax.scatter(xs, curve.devices, s=12, color=colour, alpha=0.6, linewidths=0, zorder=3)
    point: dict[str, Any] = {"marker": marker, "facecolors": "none", "edgecolors": colour, "linewidths": 1.8}
    ax.scatter(kilobytes[-1:], rates[-1:], s=70, zorder=4, label=label, **point)


def _style(curve: Curve, number: int) -> str:
    """Returns a curve's line style; a control has the same style as in `plot_rounds`."""
    return CONTROL_STYLES[curve.name][1] if curve.name in CONTROL_STYLES else _STYLES[number % len(_STYLES)]


def _dress_comparison(ax: Axes, curves: Sequence[Curve], alone: float | None, columns: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_title("Accuracy on all classes by traffic", loc="left")
    ax.set_xlabel("kB sent and received per device since the start")
    ax.set_xscale("log")
    reached = [kilobytes / 1e3 for curve in curves for kilobytes in curve.bytes]
    ax.set_xlim(min(reached) / 1.6, max(reached) * 1.6)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.3g}" if x < 1000 else f"{x:,.0f}"))
    rates = [rate for curve in curves for rate in (*curve.accuracy, *curve.devices, alone) if rate is not None]
    ax.set_ylim(max(0.0, np.floor(10 * min(rates, default=0.0)) / 10), 1.01)
    show_percent(ax.yaxis)
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    below = (0, -0.16)  # below the axes, clear of the curves
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=below, ncols=columns, frameon=False)
