"""Figures of an experiment, as wide as a journal's column or page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill_lab.experiments.summary import Line
from fleetdistill_lab.simulation.report.device_plots import show_percent

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AXES", "CURVE_TITLES", "draw_boxes", "draw_curves", "draw_lines", "draw_partitions", "save_figure"]

COLUMN_MM, PAGE_MM = 84, 174
_INCH_MM = 25.4
_MIN_SPAN = 0.05
"""Smallest part of a value that an axis of bytes spans."""
AXES = {
    "round": "rounds",
    "exchanges": "exchanges of a device",
    "kilobytes": "kB from and to a device",
    "steps": "thousand local steps of a device",
    "seconds": "seconds on this machine, start and interruptions included",
}
"""What a curve may be a function of, with the axis's title."""
_STYLE = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "legend.fontsize": 6,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fleetdistill",
}


def _new(columns: int, rows: int, width_mm: float, height_mm: float) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_mm / _INCH_MM, rows * height_mm / _INCH_MM), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _tidy(ax: Axes) -> None:
    ax.grid(color="#e6e6e6", linewidth=0.5)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, folder: Path, name: str, formats: Sequence[str] = ("pdf", "svg")) -> list[Path]:
    """Writes a figure in several formats and returns the files. PDF files embed their fonts."""
    import matplotlib

    result = [folder / f"{name}.{suffix}" for suffix in formats]
    with matplotlib.rc_context(_STYLE):
        for file in result:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return result


def draw_lines(lines: Sequence[Line], title: str) -> Figure:
    """Draws the models' accuracy on all classes by bytes, with a bar of one standard deviation."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(1, 1, PAGE_MM, 100)
        ax = axes[0, 0]
        methods = list(dict.fromkeys(line.method for line in lines))
        drawn = Counter[str]()
        for line in lines:
            if line.accuracy is None:
                continue
            at = methods.index(line.method)
            look: dict[str, Any] = {"color": f"C{at % 10}", "label": line.name}
            marker = "osD^vP*X"[(drawn[line.method] + at // 10 * 3) % 8]
            drawn[line.method] += 1
            if not line.exchanges:
                ax.axhline(line.accuracy, linestyle=":", linewidth=1.5, **look)
                continue
            spread = line.accuracy_spread or 0.0
            ax.errorbar(
                line.bytes / 1e3,
                line.accuracy,
                yerr=spread,
                marker=marker,
                markersize=4,
                linestyle="",
                capsize=2,
                **look,
            )
        _show_kilobytes(ax)
        ax.set_xlabel("kB sent and received per device in the whole run")
        ax.set_ylabel("accuracy on all classes")
        show_percent(ax.yaxis)
        ax.set_title(title, loc="left")
        _tidy(ax)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_curves(rounds: pandas.DataFrame, metric: str, x: str) -> Figure | None:
    """Draws a metric as a function of what was spent: the mean over seeds, and their range.

    Args:
        rounds: Table `rounds` with the columns label, point and seed.
        metric: Name in `CURVE_TITLES`.
        x: Name in `AXES`.

    Returns:
        The figure, a panel for each grid point; None if no round has both.
    """
    import matplotlib

    if not rounds[metric].notna().any():
        return None
    table = rounds.assign(steps=rounds["steps"] / 1e3, kilobytes=_bytes_until(rounds) / 1e3)
    known = table[table[metric].notna() & table[x].notna()]
    if known.empty:
        return None
    points, labels = list(dict.fromkeys(known["point"])), list(dict.fromkeys(rounds["label"]))
    columns = min(3, len(points))
    with matplotlib.rc_context(_STYLE):
        width = COLUMN_MM if columns == 1 else PAGE_MM
        figure, axes = _new(columns, math.ceil(len(points) / columns), width, 60)
        for ax, point in zip(axes.flat, points, strict=False):
            for at, label in enumerate(labels):
                of = known[(known["point"] == point) & (known["label"] == label)]
                if of.empty:
                    continue
                by_round = of.groupby("round")[[x, metric]].agg(["mean", "min", "max"])
                look: Any = {"color": f"C{at % 10}", "linestyle": ("-", "--", ":", "-.")[(at + at // 20) % 4]}
                marker = "." if len(by_round) == 1 else ""
                ax.plot(by_round[x]["mean"], by_round[metric]["mean"], label=label, marker=marker, **look)
                band, color = by_round[metric], look["color"]
                ax.fill_between(by_round[x]["mean"], band["min"], band["max"], alpha=0.12, linewidth=0, color=color)
            ax.set_title(point, loc="left")
            ax.set_xlabel(AXES[x])
            if x == "kilobytes":
                _show_kilobytes(ax)
            show_percent(ax.yaxis)
            _tidy(ax)
        for ax in axes[:, 0]:
            ax.set_ylabel(CURVE_TITLES[metric])
        for ax in axes.flat[len(points) :]:
            ax.remove()
        drawn = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2 + columns, frameon=False)
    return figure


def _show_kilobytes(ax: Axes) -> None:
    """Sets the x axis, after all lines: logarithmic, unless the values are less than a factor of 2 apart.

    Its ticks are plain numbers that do not overlap. It spans 5 % of a value or more, since headers differ by bytes.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = ax.dataLim.intervalx
    if 0 < high < 2 * low:  # without any method that sends, they are infinite
        middle, half = (low + high) / 2, max(high - low, _MIN_SPAN * high) / 2
        ax.set_xlim(middle - 1.1 * half, middle + 1.1 * half)
        ax.xaxis.set_major_locator(MaxNLocator(5))
    else:
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        decades = math.log10(high / max(low, high * 1e-9))
        ax.xaxis.set_major_locator(LogLocator(subs=(1,) if decades > 3 else (1, 3) if decades > 1 else (1, 2, 3, 5, 7)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda kilobytes, _: f"{kilobytes:,.10g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


CURVE_TITLES: Mapping[str, str] = {
    "global": "accuracy of the global model",
    "trained": "accuracy of device models",
    "c_spec": "accuracy on own classes (C-Spec)",
}
"""Metrics with a value after each round that are drawn, and their titles."""


def _bytes_until(rounds: pandas.DataFrame) -> Any:
    """Returns the bytes of a device, both ways, from the start of its run to each round, by index."""
    total = rounds["bytes_up"] + rounds["bytes_down"]
    return total.groupby([rounds["label"], rounds["point"], rounds["seed"]]).cumsum()


_BIN_EDGES = [at / 10 - 1e-9 for at in range(10)] + [1 + 1e-9]
"""Edges of the bins of report.json: a rounded 0.3 is in [0.3, 0.4)."""


def draw_boxes(devices: pandas.DataFrame, value: str, *, histogram: bool = False) -> Figure | None:
    """Draws box plots of the devices' accuracies over all seeds, a row for each grid point.

    Args:
        devices: Table `devices` with the columns label, point and seed.
        value: `accuracy` or `own_accuracy`.
        histogram: Whether to draw the number of devices in each tenth instead.

    Returns:
        The figure; None if no device was scored.
    """
    import matplotlib

    known = devices[devices[value].notna()]
    if known.empty:
        return None
    points, labels = list(dict.fromkeys(known["point"])), list(dict.fromkeys(known["label"]))
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(1, len(points), PAGE_MM, 12 + 5 * len(labels))
        for row, point in enumerate(points):
            ax = axes[row, 0]
            of = [known[(known["point"] == point) & (known["label"] == label)][value].tolist() for label in labels]
            if histogram:
                ax.hist(of, bins=_BIN_EDGES, label=labels)
                ax.set_ylabel("devices")
                ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            else:
                ax.boxplot(of, orientation="horizontal", tick_labels=labels, widths=0.6, flierprops={"markersize": 2})
                ax.invert_yaxis()
            show_percent(ax.xaxis)
            ax.set_title(point, loc="left")
            _tidy(ax)
    return figure


def draw_partitions(partitions: pandas.DataFrame, max_devices: int = 50) -> Figure:
    """Draws the devices' rows of each class for the first seed of each grid point.

    Args:
        partitions: Table `partitions` with the columns label, point and seed.
        max_devices: Number of devices to draw; the first ones.
    """
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    points = list(dict.fromkeys(partitions["point"]))
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(len(points), 1, min(PAGE_MM, COLUMN_MM * len(points)), 60)
        for ax, point in zip(axes[0], points, strict=True):
            of = partitions[partitions["point"] == point]
            first = of[(of["label"] == of["label"].iloc[0]) & (of["seed"] == of["seed"].iloc[0])]
            classes, names = list(dict.fromkeys(first["class"])), list(dict.fromkeys(first["device"]))[:max_devices]
            counts = first.pivot(index="device", columns="class", values="samples").loc[names, classes]
            image = ax.imshow(counts, aspect="auto", cmap="Blues", vmin=0)
            ax.set_title(f"{point}, seed {first['seed'].iloc[0]}".removeprefix(", "), loc="left")
            ax.set_xlabel("class")
            ax.set_ylabel("device")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            figure.colorbar(image, ax=ax, label="rows")
    return figure
