"""Plots of single devices: accuracy by round, and each device's gain over local-only training.

This module does not import matplotlib at its top; callers pass the axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Rate = TypeVar("Rate")

FLEET = "#0b6fa4"  # colour-blind readers can distinguish these shades of blue, orange, green and purple
ALONE = "#d9772b"
FEDAVG = "#2f9e6e"
FURTHER = "#8a2f7c"
GREY = "#5a5a5a"
SINGLE_LINES = 10
"""Largest number of devices with a line each; more are drawn as a band with lines for the worst and the best."""
_DEVICE_COLOURS = (
    FLEET,
    "#c44e52",
    "#8172b3",
    "#937860",
    "#da8bc3",
    "#4c4c4c",
    "#b8860b",
    "#17a2b8",
    "#6b8e23",
    "#7f3b08",
)
CONTROL_STYLES = {"alone, mean": (ALONE, ":"), "FedAvg global": (FEDAVG, "-."), "global model": ("black", "--")}
"""Maps each control to its colour and line style, which are the same in all plots."""
_LOWEST_GAP = 0.055
"""Smallest distance between two labels, as a fraction of the axis."""


@dataclass(frozen=True)
class DeviceCurves:
    """Accuracies on the global test set, in [0, 1].

    Attributes:
        devices: For each device, the accuracy after each completed round; None where it was not scored.
        controls: For each control, the accuracy after each completed round; None if unknown. Names in
            `CONTROL_STYLES` have their own styles.
        alone: For each device, the final accuracy of local-only training; empty without this control.
        further: For each further variant, the final accuracy of the devices that have it.
        moment: Time of the final accuracies, for a title.
        fleet: Accuracy of the model that each scored device has at the end; empty if it is the last of `devices`.
    """

    devices: Mapping[str, Sequence[float | None]]
    controls: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)
    further: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moment: str = "at the end"
    fleet: Mapping[str, float] = field(default_factory=dict)

    @property
    def final(self) -> Mapping[str, float]:
        """Each scored device's final accuracy in the fleet: `fleet`, or the last of `devices`."""
        last = {name: rates[-1] for name, rates in self.devices.items()}
        return self.fleet or {name: rate for name, rate in last.items() if rate is not None}

    def of_rows(self, rows: Sequence[int]) -> DeviceCurves:
        """Returns the curves of some devices, given their numbers in order."""
        devices = list(self.devices)
        names = {devices[row] for row in rows}

        def chosen(of: Mapping[str, Rate]) -> dict[str, Rate]:
            return {name: one for name, one in of.items() if name in names}

        further = {variant: chosen(of) for variant, of in self.further.items()}
        return replace(
            self, devices=chosen(self.devices), fleet=chosen(self.fleet), alone=chosen(self.alone), further=further
        )


def plot_rounds(ax: Axes, curves: DeviceCurves) -> None:
    """Draws accuracy by round: a labelled line for each device and control; see `SINGLE_LINES` for many devices.

    Raises:
        DataError: There are no devices or no rounds, or the curves differ in length.
    """
    lengths = {len(item) for item in (*curves.devices.values(), *curves.controls.values())}
    if len(lengths) != 1 or not curves.devices or lengths == {0}:
        text = f"cannot plot rounds: {len(curves.devices)} devices have curves of lengths {sorted(lengths)}"
        raise DataError(f"{text}, expected at least one device, and curves of one length above 0")
    rates_jr = np.array(list(curves.devices.values()), dtype=np.float64)
    scored = np.flatnonzero(np.isfinite(rates_jr).any(axis=0))
    rounds, rates_jr = scored + 1, rates_jr[:, scored]
    ends: list[tuple[str, float, str]] = []
    if len(curves.devices) > SINGLE_LINES:
        ends += _draw_band(ax, rounds, rates_jr)
    for name, rates, colour in _single_lines(curves.devices, rates_jr):
        ax.plot(rounds, rates, color=colour, linewidth=1.4, alpha=0.9)
        if np.isfinite(rates[-1]):
            ends.append((name, float(rates[-1]), colour))
    for name, known in curves.controls.items():
        colour, style = CONTROL_STYLES.get(name, (GREY, "--"))
        rates = np.array(known, dtype=np.float64)  # None becomes NaN, which is left out
        scored = np.flatnonzero(np.isfinite(rates))
        ax.plot(scored + 1, rates[scored], color=colour, linestyle=style, linewidth=2.2)
        if np.isfinite(rates[-1]):
            ends.append((name, float(rates[-1]), colour))
    _dress(ax, lengths.pop())
    _name_ends(ax, ends)


def _draw_band(
    ax: Axes, rounds: npt.NDArray[np.int64], rates_jr: npt.NDArray[np.float64]
) -> list[tuple[str, float, str]]:
    """Draws the band of the middle 90 % of devices and the median; returns the median's label."""
    low, median, high = np.nanquantile(rates_jr, (0.05, 0.5, 0.95), axis=0)
    ax.fill_between(rounds, low, high, color=FLEET, alpha=0.18, linewidth=0)
    ax.plot(rounds, median, color=FLEET, linewidth=2.5)
    scored = int(np.isfinite(rates_jr[:, -1]).sum())
    return [(f"median of {scored}, band: 90 %", float(median[-1]), FLEET)]


def _single_lines(
    devices: Mapping[str, Sequence[float | None]], rates_jr: npt.NDArray[np.float64]
) -> Iterator[tuple[str, npt.NDArray[np.float64], str]]:
    """Yields the devices that get a line, with their accuracies and colours."""
    names = list(devices)
    if len(names) <= SINGLE_LINES:
        yield from zip(names, rates_jr, _DEVICE_COLOURS, strict=False)
        return
    known = np.flatnonzero(np.isfinite(rates_jr[:, -1]))
    order = known[np.argsort(rates_jr[known, -1], kind="stable")]
    for row, colour in ((int(order[0]), "#c44e52"), (int(order[-1]), "#6b8e23")):
        yield names[row], rates_jr[row], colour


def _dress(ax: Axes, rounds: int) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title("Accuracy on all classes by round", loc="left")
    ax.set_xlabel("completed rounds")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    show_percent(ax.yaxis)
    ax.set_xlim(1 - 0.02 * rounds, rounds)
    ax.set_ylim(max(0.0, ax.get_ylim()[0]), min(1.01, ax.get_ylim()[1]))
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _name_ends(ax: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Labels each line at its right end, spread vertically so that labels do not overlap."""
    low, high = ax.get_ylim()
    ordered = sorted(ends, key=lambda end: end[1])
    heights = apart([(end[1] - low) / (high - low) for end in ordered], _LOWEST_GAP)
    for (name, rate, colour), height in zip(ordered, heights, strict=True):
        ax.annotate(
            f"{name} {rate:.1%}",
            (1.0, (rate - low) / (high - low)),
            (1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize="small",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkB": 0},
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Spreads ascending heights to a distance of at least `gap`, keeping the mean of each group that touches."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _bottom(clusters[-1], gap) < _top(clusters[-2], gap) + gap:
            last = clusters.pop()
            clusters[-1] = [*clusters[-1], *last]
    return [_bottom(cluster, gap) + gap * number for cluster in clusters for number in range(len(cluster))]


def _bottom(cluster: Sequence[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _top(cluster: Sequence[float], gap: float) -> float:
    return _bottom(cluster, gap) + gap * (len(cluster) - 1)


def plot_gains(ax: Axes, curves: DeviceCurves) -> None:
    """Draws a row for each device, the first on top, with the final accuracy alone, in the fleet and per variant."""
    rows = {name: number for number, name in enumerate(curves.devices)}
    fleet = curves.final
    for name, rate in curves.alone.items():
        ax.plot([rate, fleet.get(name, rate)], [rows[name]] * 2, color="#c8c8c8", linewidth=1.5, zorder=1)
    kinds = [("alone", curves.alone, ALONE, "o"), ("in the fleet", fleet, FLEET, "D")]
    kinds += [(f"{variant} model", of, FURTHER, "^") for variant, of in curves.further.items()]
    for name, of, colour, marker in kinds:
        if of:
            ax.scatter(
                list(of.values()),
                [rows[device] for device in of],
                s=26,
                color=colour,
                marker=marker,
                label=name,
                zorder=3,
            )
    ax.set_title(f"Accuracy {curves.moment}", loc="left")
    _dress_gains(ax, len(rows), sum(bool(of) for _, of, _, _ in kinds))


def _dress_gains(ax: Axes, devices: int, kinds: int) -> None:
    show_percent(ax.xaxis)
    ax.set_ylim(devices - 0.4, -0.6)  # the first device on top
    ax.set_yticks(range(devices), [""] * devices)
    ax.margins(x=0.08)
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    figure_legend = {"loc": "upper right", "bbox_to_anchor": (1, 0), "borderaxespad": 2.2, "frameon": False}
    if kinds:
        ax.legend(**figure_legend, fontsize="small", ncols=min(kinds, 2), columnspacing=1.0, handletextpad=0.2)


def show_percent(axis: Axis) -> None:
    """Shows rates on an axis in percent, with as many digits as a tick has."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:.10g}%"))
