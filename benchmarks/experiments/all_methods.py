"""Draws all methods on one task: accuracy by bytes, and by the part of the training rows that an audit links.

    fleetdistill experiment run all-methods --scale small --workers 2
    FLEETDISTILL_DATA=data python benchmarks/experiments/all_methods.py out/experiments/all-methods-small

Accuracies and bytes are those of the experiment. For `linked` each method runs once more, as for `audit_methods.py`:
MNIST averaged to 8x8, 1,500 rows on five devices, alpha 0.5, one seed. A method whose messages no attack of the audit
reads is left out of the second picture, and the table says so.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetdistill.errors import FleetDistillError
from fleetdistill_lab.audit.audit import Audit, record_run, report
from fleetdistill_lab.audit.public_set import read_public, split_public
from fleetdistill_lab.experiments.definition import find_experiment, read_experiment
from fleetdistill_lab.experiments.results import open_results
from fleetdistill_lab.simulation.report.device_plots import show_percent
from fleetdistill_server.config.run_config import run_config

_PART_OF_LABEL = 1 / 45
"""Smallest distance of two labels, as a part of the axis."""


@dataclass(frozen=True)
class Point:
    """A method: mean accuracies on all and on own classes in [0, 1], bytes of a device, and what is linked."""

    label: str
    method: str
    accuracy: float
    own_accuracy: float
    nbytes: float
    linked: float | None


def linked(method: str, device: str, extractor: str, seed: int = 0) -> float | None:
    """The largest part of the rows that an attack links; None if no attack reads what the method sends."""
    config = run_config(
        {
            "run": {"name": "audit", "method": method},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "model": {"device": device, "extractor": extractor},
            "server": {"torch_device": "cpu"},
        }
    )
    data = read_public("mnist", config.contract)
    wanted = Audit(config=config, data=data, models=(device,), seed=seed)
    public = split_public(data, wanted.rows, seed)
    parts = report(wanted, public, record_run(wanted, public)).parts
    return max((result.linked for attacks in parts.values() for result in attacks.values()), default=None)


def read_points(folder: Path, point: str) -> list[Point]:
    """The methods of a grid point of the experiment, each audited."""
    methods = read_experiment(find_experiment("all-methods")).methods
    result = []
    with open_results(folder) as results:
        values = {name: results.values(name)[point] for name in ("accuracy", "own_accuracy", "bytes")}
    for label, entry in methods.items():
        means = [statistics.mean(values[name][label].values()) for name in values if values[name].get(label)]
        if len(means) < len(values):
            print(f"{label}: no results")
            continue
        try:
            (device,) = entry.simulation.get("models", ["digits_cnn_large"])
            extractor = entry.simulation.get("extractor", "digits_extractor")
            found = None if entry.settings else linked(entry.method or label, device, extractor)
        except FleetDistillError as error:
            print(f"{label}: {error}")
            found = None
        result.append(Point(label, entry.method or label, *means, found))
    return result


def draw(points: list[Point], file: Path) -> None:
    """Writes the picture: accuracies by bytes above, by `linked` below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 13), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for row, (x, title) in enumerate(
        (("nbytes", "bytes from and to a device"), ("linked", "rows that the audit links"))
    ):
        for column, (y, name) in enumerate(
            (("accuracy", "accuracy on all classes"), ("own_accuracy", "accuracy on own classes"))
        ):
            ax = axes[row, column]
            shown = [point for point in points if getattr(point, x) is not None]
            place(ax, [(getattr(point, x), getattr(point, y), point.label) for point in shown], log=x == "nbytes")
            ax.set_xlabel(title)
            show_percent(ax.yaxis)
            ax.set_ylabel(name)
            ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def place(ax: Any, points: list[tuple[float, float, str]], log: bool) -> None:
    """Draws points with their names beside them; names are moved up where they would overlap."""
    ours = "class statistics"
    if log:
        ax.set_xscale("log")
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    step, last = (high - low) * _PART_OF_LABEL, float("-inf")
    right = max(x for x, _, _ in points)
    for x, y, name in sorted(points, key=lambda one: one[1]):
        color = "C3" if name == ours else "C2" if name in ("alone", "FedAvg", "FedAvg, falling rate") else "C0"
        ax.plot(x, y, "o", color=color, markersize=5)
        last = max(y, last + step)
        end = right * 1.6 if log else right + 0.03 * max(right, 0.01)
        ax.annotate(
            name,
            (x, y),
            (end, last),
            fontsize=7,
            color=color,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.25, "linewidth": 0.5},
            annotation_clip=False,
        )


def main() -> None:
    """Measures, prints the table and draws."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--point", default="alpha 0.1")
    parser.add_argument("--out", type=Path, default=Path("out/all-methods.png"))
    given = parser.parse_args()
    points = read_points(given.folder, given.point)
    print("| method | all classes | own classes | kB | linked |\n|---|---|---|---|---|")
    for one in sorted(points, key=lambda point: -point.accuracy):
        found = "no attack" if one.linked is None else f"{one.linked:.3f}"
        print(f"| {one.label} | {one.accuracy:.1%} | {one.own_accuracy:.1%} | {one.nbytes / 1e3:,.1f} | {found} |")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(points, given.out)


if __name__ == "__main__":
    main()
