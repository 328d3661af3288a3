"""Means, spreads and paired differences over seeds, as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill_lab.experiments.sweep import Result
from fleetdistill_server.texts import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Line", "holm", "lines_of", "make_table", "paired_p", "save_csv", "save_figure"]


@dataclass(frozen=True)
class Line:
    """One model over all seeds; accuracies are in [0, 1].

    Attributes:
        method: The method.
        name: The model.
        seeds: Number of seeds that have it.
        accuracy, accuracy_spread: Mean accuracy on all classes, and its standard deviation over seeds; None if it was
            not scored, or with a single seed.
        own_accuracy, own_accuracy_spread: The same with classes weighted by each device's samples.
        bytes: Mean bytes from and to a device in the whole run.
        exchanges: Mean number of a device's exchanges.
        difference, difference_spread: Mean and standard deviation of the paired difference in accuracy from the first
            line; None for the first line.
        p: Two-sided p value of a paired t test of the difference, by Holm's method for the number of lines; None if
            there are fewer than two pairs, or all differences are equal.
    """

    method: str
    name: str
    seeds: int
    accuracy: float | None
    accuracy_spread: float | None
    own_accuracy: float | None
    own_accuracy_spread: float | None
    bytes: float
    exchanges: float
    difference: float | None = None
    difference_spread: float | None = None
    p: float | None = None


def lines_of(results: Sequence[Result]) -> list[Line]:
    """Returns a line for each model, in order of appearance.

    Differences are from the first model of the first method, over the seeds that have both.
    """
    names = list(dict.fromkeys(result.row.name for result in results))
    methods = {result.row.name: result.method for result in results}
    by_seed = {name: {one.seed: one.row for one in results if one.row.name == name} for name in names}
    accuracies = {
        name: {seed: row.accuracy for seed, row in rows.items() if row.accuracy is not None}
        for name, rows in by_seed.items()
    }
    differences = {
        name: [rate - accuracies[names[0]][seed] for seed, rate in rates.items() if seed in accuracies[names[0]]]
        for name, rates in accuracies.items()
    }
    p_values = holm([None if name == names[0] else paired_p(differences[name]) for name in names])
    result = []
    for name, p in zip(names, p_values, strict=True):
        rows, own = list(by_seed[name].values()), differences[name] if name != names[0] else []
        accuracy, spread = _mean_and_spread(list(accuracies[name].values()))
        own_rates = [row.own_accuracy for row in rows if row.own_accuracy is not None]
        result.append(
            Line(
                methods[name],
                name,
                len(rows),
                accuracy,
                spread,
                *_mean_and_spread(own_rates),
                statistics.mean(row.bytes for row in rows),
                statistics.mean(row.exchanges for row in rows),
                *_mean_and_spread(own),
                p,
            )
        )
    return result


def _mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.mean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def paired_p(differences: Sequence[float]) -> float | None:
    """Returns the two-sided p value of a paired t test; None for fewer than two pairs or equal differences."""
    if len(differences) < 2 or len(set(differences)) == 1:
        return None
    from scipy import stats

    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusts p values for their number by Holm's method; None stays None and does not count.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 1979.
    """
    known = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[at] = largest
    return adjusted


def make_table(lines: Sequence[Line], title: str) -> Table:
    """Formats lines as a table in percent and percentage points."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("all classes", "own classes", "bytes", "exchanges", f"from {lines[0].name}", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.name,
            _percent(line.accuracy, line.accuracy_spread),
            _percent(line.own_accuracy, line.own_accuracy_spread),
            readable_bytes(round(line.bytes)),
            f"{line.exchanges:.3g}",
            "" if line.difference is None else _percent(line.difference, line.difference_spread, "+"),
            "" if line.p is None else f"{line.p:.2g}",
        )
    return table


def _percent(rate: float | None, spread: float | None, sign: str = "") -> str:
    if rate is None:
        return "not scored"
    return f"{100 * rate:{sign}.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def save_csv(results: Sequence[Result], file: Path) -> None:
    """Writes a row for each model and seed."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, ["method", "seed", "name", "accuracy", "own_accuracy", "bytes", "exchanges"])
        writer.writeheader()
        writer.writerows({"method": one.method, "seed": one.seed, **asdict(one.row)} for one in results)


def save_figure(lines: Sequence[Line], file: Path, title: str) -> None:
    """Draws the models' accuracy on all classes by bytes, with a bar of one standard deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    methods = list(dict.fromkeys(line.method for line in lines))
    drawn = Counter[str]()
    for line in lines:
        if line.accuracy is None:
            continue
        look: dict[str, Any] = {"color": f"C{methods.index(line.method) % 10}", "label": line.name}
        marker = "osD^v"[drawn[line.method] % 5]
        drawn[line.method] += 1
        if not line.exchanges:
            ax.axhline(line.accuracy, linestyle=":", linewidth=2, **look)
            continue
        spread = line.accuracy_spread or 0.0
        ax.errorbar(line.bytes / 1e3, line.accuracy, yerr=spread, marker=marker, linestyle="", capsize=3, **look)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda kilobytes, _: f"{kilobytes:,.10g}"))
    ax.set_xlabel("kB sent and received per device in the whole run")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_title(title, loc="left", fontsize=11)
    ax.grid(color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(file, format="png")
