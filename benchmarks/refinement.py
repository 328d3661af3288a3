"""Times each refinement as a multiple of one log_softmax of the same logits. Run: python benchmarks/refinement.py

Everything is timed in alternation within one run on one thread, and the ratios' medians are printed: they survive a
busy or throttling machine, seconds would not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from fleetdistill_server.methods.feddkc.kernels import kkr_kernel
from fleetdistill_server.methods.feddkc.kkr import kkr
from fleetdistill_server.methods.feddkc.refined import no_refinement
from fleetdistill_server.methods.feddkc.skr import skr

ROWS, CLASSES, REPEATS = 60_000, 10, 15

Task = Callable[[], object]


def seconds(task: Task) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    logits = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0)) * 3
    wide = logits.double()
    peak, entropy = (1 + 1 / CLASSES) / 2, 0.5 * math.log2(CLASSES)
    yardsticks: dict[str, Task] = {"float32": lambda: logits.log_softmax(1), "float64": lambda: wide.log_softmax(1)}
    refinements: dict[str, Task] = {
        "none": lambda: no_refinement(logits, temperature=1.0),
        "kkr": lambda: kkr(logits, peak),
        "skr": lambda: skr(logits, entropy),
        "kkr_kernel exp": lambda: kkr_kernel(logits, peak),
        "kkr_kernel quadratic": lambda: kkr_kernel(logits, peak, kernel="quadratic"),
    }
    tasks = yardsticks | refinements
    for task in tasks.values():
        task()
    rounds = [{name: seconds(task) for name, task in tasks.items()} for _ in range(REPEATS)]

    print(f"{ROWS} x {CLASSES} float32 logits, one thread, medians of {REPEATS} ratios to one log_softmax")
    print(f"{'':22}{'float32':>9}{'float64':>9}")
    for name in refinements:
        ratios = (median(times[name] / times[yardstick] for times in rounds) for yardstick in yardsticks)
        print(f"{name:22}" + "".join(f"{ratio:9.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
