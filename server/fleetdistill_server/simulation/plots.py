"""Pictures for a simulation's report: who has which data, and whether the fleet beats training alone.

matplotlib is imported where it is used, without pyplot: no window system, no global list of open figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import DataError
from fleetdistill_server.simulation.partition import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLEET = "#0b6fa4"  # blue and orange stay apart for colour-blind readers and in grey
_ALONE = "#d9772b"
_GREY = "#5a5a5a"

Curves = Mapping[str, Sequence[float]]
"""Device name -> one value per round; NaN where the device was not scored."""
LateCurves = Mapping[str, Sequence[float | None]]
"""The same of an answer that devices do not have from the start; None before."""


def plot_partition(
    ax: Axes,
    labels: npt.ArrayLike,
    partition: Partition,
    class_names: Sequence[str],
    device_names: Sequence[str],
) -> None:
    """Draws a bubble for each device and class, its area the number of samples; sizes stand at the right.

    Raises:
        DataError: The number of names does not fit the partition or its labels.
    """
    devices = len(partition.indices)
    if len(device_names) != devices:
        raise DataError(f"{len(device_names)} device names for a partition of {devices} devices")
    counts = partition.class_counts(labels, len(class_names))
    _draw_bubbles(ax, counts)
    _name_axes(ax, counts, class_names, device_names)
    ax.set_title(f"Training data by device: {_described(partition)}", loc="left", fontsize=11)


def plot_curves(
    ax: Axes,
    rounds: Sequence[int],
    fleet_by_device: Curves,
    alone_by_device: Curves,
    further_by_device: Mapping[str, LateCurves] = MappingProxyType({}),
) -> None:
    """Draws accuracy against rounds: single devices thin, the means over devices bold, of further answers dashed.

    Args:
        rounds: Round numbers, ascending.
        fleet_by_device: Accuracies in [0, 1] of devices that learn together.
        alone_by_device: The same of devices that train alone; may be empty.
        further_by_device: The same by name of an answer that the fleet's devices have beside the general one.

    Raises:
        DataError: There are no rounds or no devices, or a curve has another length than `rounds`.
    """
    if not rounds or not fleet_by_device:
        raise DataError(f"nothing to plot: {len(rounds)} rounds, {len(fleet_by_device)} devices")
    _draw_curves(ax, rounds, alone_by_device, "alone", _ALONE)
    _draw_curves(ax, rounds, fleet_by_device, "fleet", _FLEET)
    for answer, by_device in further_by_device.items():
        name = f"fleet, {answer} answers on all classes"
        _check_lengths(rounds, by_device, name)
        _draw_mean(ax, rounds, np.array(list(by_device.values()), dtype=np.float64), name, _FLEET, "--")
    _dress_curves(ax, rounds)


def save_report_figure(
    path: str | os.PathLike[str],
    *,
    labels: npt.ArrayLike,
    partition: Partition,
    class_names: Sequence[str],
    device_names: Sequence[str],
    rounds: Sequence[int],
    fleet_by_device: Curves,
    alone_by_device: Curves,
    further_by_device: Mapping[str, LateCurves] = MappingProxyType({}),
    title: str = "",
) -> Path:
    """Writes both pictures into one PNG, 1,800 pixels wide, and returns its path.

    Raises:
        DataError: The values do not fit each other, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 4.2 + max(3.0, 1.3 + 0.3 * len(device_names))
    figure = Figure(figsize=(9, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)  # a figure without pyplot holds nothing open: it goes when this function returns
    curves, data = figure.subplots(2, 1, height_ratios=[4.2, height - 4.2])
    plot_curves(curves, rounds, fleet_by_device, alone_by_device, further_by_device)
    plot_partition(data, labels, partition, class_names, device_names)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="png")
    except OSError as error:
        raise DataError(f"cannot write the figure to {target}: {error}; choose another folder") from error
    return target


def _draw_bubbles(ax: Axes, counts: npt.NDArray[np.int64]) -> None:
    devices, classes = counts.shape
    ys, xs = np.nonzero(counts)
    sizes = counts[ys, xs]
    points = 72 / ax.figure.dpi
    cell = min(ax.bbox.width * points / classes, ax.bbox.height * points / devices)
    largest = min(28.0, max(10.0, 0.9 * cell))  # in points; above 10 no bubble touches its neighbours
    ax.scatter(xs, ys, s=largest**2 * sizes / sizes.max(initial=1), color=_FLEET, alpha=0.75, linewidths=0)


def _name_axes(
    ax: Axes, counts: npt.NDArray[np.int64], class_names: Sequence[str], device_names: Sequence[str]
) -> None:
    devices, classes = counts.shape
    every = -(-classes // 25)  # with 100 classes, name every fourth
    long_names = max(len(name) for name in class_names) > 6 or classes > 15
    ax.set_xticks(range(0, classes, every), class_names[::every], rotation=35 if long_names else 0)
    for tick in ax.get_xticklabels():
        tick.set_horizontalalignment("right" if long_names else "center")
    ax.set_yticks(range(devices), device_names)
    ax.set_xlim(-0.6, classes - 0.4)
    ax.set_ylim(devices - 0.4, -0.6)  # the first device on top
    for device, size in enumerate(counts.sum(axis=1)):
        ax.annotate(f"{size:,}", (1.01, device), xycoords=("axes fraction", "data"), va="center", color=_GREY)
    ax.annotate("samples", (1.01, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color=_GREY)
    ax.set_xlabel("class")
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)


def _described(partition: Partition) -> str:
    settings = [f"{name} {partition.parameters[name]}" for name in ("alpha", "seed") if name in partition.parameters]
    return ", ".join([partition.kind, *settings])


def _check_lengths(rounds: Sequence[int], by_device: LateCurves, name: str) -> None:
    for device, values in by_device.items():
        if len(values) != len(rounds):
            raise DataError(f"device {device!r} ({name}) has {len(values)} values for {len(rounds)} rounds")


def _draw_curves(ax: Axes, rounds: Sequence[int], by_device: Curves, name: str, colour: str) -> None:
    _check_lengths(rounds, by_device, name)
    for values in by_device.values():
        ax.plot(rounds, values, color=colour, alpha=0.3, linewidth=1)
    if by_device:
        _draw_mean(ax, rounds, np.array(list(by_device.values()), dtype=np.float64), name, colour, "-")


def _draw_mean(
    ax: Axes, rounds: Sequence[int], values: npt.NDArray[np.float64], name: str, colour: str, style: str
) -> None:
    mean = _mean_of_scored(values)
    last = f", {mean[-1]:.1%} at the end" if np.isfinite(mean[-1]) else ""
    ax.plot(rounds, mean, color=colour, linewidth=3, linestyle=style, marker="o" if len(rounds) == 1 else "")
    ax.plot([], [], color=colour, linewidth=3, linestyle=style, label=f"{name}: mean of {len(values)} devices{last}")


def _mean_of_scored(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean over the devices that were scored in a round; NaN, without a warning, where none was."""
    scored = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: npt.NDArray[np.float64] = np.where(scored, values, 0.0).sum(axis=0) / scored.sum(axis=0)
    return mean


def _dress_curves(ax: Axes, rounds: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ax.plot([], [], color=_GREY, alpha=0.5, linewidth=1, label="single devices")
    ax.set_title("Accuracy on the test set: learning together and alone", loc="left", fontsize=11)
    ax.set_xlabel("round")
    ax.set_ylim(0, 1)
    margin = 0.0 if len(rounds) > 1 else 1.0
    ax.set_xlim(rounds[0] - margin, rounds[-1] + margin)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    handles, names = ax.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: (names[i] == "single devices", not names[i].startswith("fleet")))
    ax.legend([handles[i] for i in order], [names[i] for i in order], loc="lower right", frameon=False)
