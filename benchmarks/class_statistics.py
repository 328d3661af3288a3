"""Time and memory of class statistics. Run: OMP_NUM_THREADS=1 python benchmarks/class_statistics.py

Beside each task two yardsticks run in the same turn, on the matrix behind it: one pass over it, and for summaries and
merges LAPACK's economical singular value decomposition, in the first turns only. The ratios' medians survive a busy
machine, seconds do not. Memory is by how much a task raises the process's peak above what it had before (Linux).
Merges are of one class at a time, from summaries that are made up just before.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.gaussians import ClassSummary, draw_classes, merge, shrink, summarise

MB = 2**20
Task = Callable[[], object]
Turn = tuple[Array, Task]
"""The matrix for the yardsticks, and what is measured."""


@dataclass
class Figures:
    """Of every turn of one task: seconds, multiples of the yardsticks, and bytes."""

    seconds: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    decompositions: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def row(self) -> str:
        svd = f"{median(self.decompositions):12.3f}" if self.decompositions else f"{'':12}"
        total, each = sum(self.seconds), median(self.seconds)
        return f"{total:10.2f}{each:10.4f}{median(self.passes):9.1f}{svd}{max(self.peaks) / MB:9.0f}"


def seconds(task: Task) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def one_pass(matrix: Array) -> Array:
    return np.asarray(np.square(matrix).sum(axis=0))


def memory(name: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(turns: Iterator[Turn], decompositions: int) -> Figures:
    figures = Figures()
    for number, (matrix, task) in enumerate(turns):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = memory("VmRSS")
        taken = seconds(task)
        figures.peaks.append(memory("VmHWM") - before)
        figures.seconds.append(taken)
        figures.passes.append(taken / seconds(partial(one_pass, matrix)))
        if number < decompositions:
            svd = seconds(partial(np.linalg.svd, matrix, full_matrices=False))
            figures.decompositions.append(taken / svd)
    return figures


def rows_of(generator: np.random.Generator, rows: int, features: int) -> Array:
    """As after a ReLU: a few directions that many features share, and noise of each."""
    shared = generator.standard_normal((rows, 16)) * 0.7 ** np.arange(16)
    own = generator.standard_normal((rows, features))
    return np.maximum(shared @ generator.standard_normal((16, features)) + own, 0)


def summary_of(generator: np.random.Generator, rows: int, rank: int, features: int) -> ClassSummary:
    """A made-up one; what a merge costs does not depend on the numbers."""
    mean, directions = generator.random(features), generator.standard_normal((rank, features))
    return ClassSummary(count=rows, mean=mean, directions=directions, variance=generator.random(features))


def summaries(options: argparse.Namespace, rows: int, turns: int, generator: np.random.Generator) -> Iterator[Turn]:
    for _ in range(turns):
        found = rows_of(generator, rows, options.features)
        yield found, partial(summarise, found, options.rank)


def merge_into(merged: dict[int, ClassSummary], label: int, parts: list[ClassSummary], rank: int) -> None:
    merged[label] = merge(parts, rank)


def merges(
    options: argparse.Namespace, merged: dict[int, ClassSummary], generator: np.random.Generator
) -> Iterator[Turn]:
    """A turn for each class."""
    for label in range(options.classes):
        parts = [summary_of(generator, options.rows, options.rank, options.features) for _ in range(options.devices)]
        matrix = np.concatenate([np.concatenate([one.directions, [one.mean]]) for one in parts])
        yield matrix, partial(merge_into, merged, label, parts, options.rank)


def shrinks(options: argparse.Namespace, merged: dict[int, ClassSummary]) -> Iterator[Turn]:
    matrix = np.concatenate([np.concatenate([one.directions, [one.mean]]) for one in merged.values()])
    for _ in range(options.repeats):
        yield matrix, partial(shrink, merged, 0.1)


def draws(options: argparse.Namespace, merged: dict[int, ClassSummary]) -> Iterator[Turn]:
    matrix = np.ones((options.classes * options.drawn_rows, options.features))
    for seed in range(options.repeats):
        yield matrix, partial(draw_classes, merged, options.drawn_rows, seed, nonnegative=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of class statistics.")
    parser.add_argument("--features", type=int, default=4096, help="F")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=50, help="of a class on a device")
    parser.add_argument("--large-rows", type=int, default=6000, help="of the one large class")
    parser.add_argument("--drawn-rows", type=int, default=50, help="M")
    parser.add_argument("--repeats", type=int, default=5, help="turns of what is not done class by class")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, generator = parse(arguments), np.random.default_rng(0)
    sizes = f"{options.features} features, {options.classes} classes, {options.devices} devices, rank {options.rank}"
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"{sizes}; {os.cpu_count()} cores, {threads} threads, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}")
    print(f"{'':36}{'s in all':>10}{'s a turn':>10}{'passes':>9}{'SVDs':>12}{'peak MB':>9}")
    merged: dict[int, ClassSummary] = {}
    # The turns of each, and in how many of them the decomposition runs too.
    tasks: dict[str, tuple[Iterator[Turn], int]] = {
        f"summarise {options.rows} rows, each class": (
            summaries(options, options.rows, options.classes, generator),
            10,
        ),
        f"summarise {options.large_rows} rows": (summaries(options, options.large_rows, 3, generator), 1),
        "merge all devices, each class": (merges(options, merged, generator), 3),
        "shrink all classes": (shrinks(options, merged), 0),
        f"draw {options.drawn_rows} rows of all classes": (draws(options, merged), 0),
    }
    for name, (turns, decompositions) in tasks.items():
        print(f"{name:36}{measure(turns, decompositions).row()}", flush=True)


if __name__ == "__main__":
    main()
