"""Worker processes, Ray and stacked models against a simulation's own process: processor and wall time of a round.

    python benchmarks/workers.py [--workers 0 1 2] [--ray 2] [--turns 3] [--epochs 20]
    python benchmarks/workers.py --workers 0 --stacked --network tiny

FedAvg with 16 of 64 devices a round, 60 rows each, and a convolutional network with 20,490 parameters, or `--network
tiny`: logistic regression on 8x8 images, with 650. `--epochs` sets how much of a round is training: with 1 a device
trains for a few milliseconds, with 20 for a tenth of a second. Each kind runs in a process of its own, in turn; the
figures are medians over the turns. The first round is not measured: it starts the workers and prepares the devices. The
processor time is that of the process and all that it has started. All runs have the same results to the bit, and
stacked ones nearly; the script compares them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import tree_seconds

DEVICES, PER_ROUND, ROWS = 64, 16, 60
Figures = dict[str, float]


def cnn(input_shape: tuple[int, ...], classes: int) -> Any:
    """Builds the network of `simulation.py`, which workers import by name."""
    import simulation

    return simulation.cnn(input_shape, classes)


def tiny(input_shape: tuple[int, ...], classes: int) -> Any:
    """Builds the logistic regression of `simulation.py`."""
    import simulation

    return simulation.tiny(input_shape, classes)


def measure(workers: int, backend: str, epochs: int, rounds: int, network: str) -> Figures:
    """Runs a simulation in this process; returns seconds a round and the accuracy at the end."""
    import numpy as np
    import torch

    from fleetdistill_lab import Progress, Simulation, simulate

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    labels = np.arange(DEVICES * ROWS + 500) % 10
    shape = (1, 8, 8) if network == "tiny" else (1, 28, 28)
    inputs = (rng.random((10, *shape))[labels] + rng.normal(0, 0.5, (len(labels), *shape))).astype(np.float32)
    data = {"train_inputs": inputs[:-500], "train_labels": labels[:-500]}
    data |= {"test_inputs": inputs[-500:], "test_labels": labels[-500:]}
    marks: list[tuple[float, float]] = []

    def after_round(done: Progress) -> None:
        if done.completed:
            marks.append((time.perf_counter(), tree_seconds()))

    with tempfile.TemporaryDirectory() as folder:
        report = simulate(
            Simulation(
                method="fedavg",
                settings={"local_epochs": epochs},
                dataset=data,
                devices=DEVICES,
                devices_per_round=PER_ROUND,
                rounds=rounds + 2,
                partition="iid",
                models=(f"workers:{network}",),
                workers=workers,
                backend=backend,  # type: ignore[arg-type]  # one of the choices below
                with_alone=False,
                with_fedavg=False,
                torch_device="cpu",
                out=Path(folder) / "out",
            ),
            after_round,
        )
    # A round's end is seen after the next one's first step, in which stacked models are computed.
    wall, cpu = ((marks[-2][item] - marks[0][item]) / rounds for item in (0, 1))
    accuracy = report.curves[0].accuracy[-1]
    assert accuracy is not None  # FedAvg is scored in every round
    return {"wall": wall, "cpu": cpu, "accuracy": accuracy}


def in_own_process(workers: int, backend: str, epochs: int, rounds: int, network: str) -> Figures:
    """Measures in a new process, whose workers find this module."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    arguments = f"{workers}, {backend!r}, {epochs}, {rounds}, {network!r}"
    code = f"import json, workers; print(json.dumps(workers.measure({arguments})))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Measures in turn and prints a table row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--ray", type=int, nargs="*", default=[], help="numbers of Ray workers, with the extra ray")
    parser.add_argument("--stacked", action="store_true", help="networks that train together")
    parser.add_argument("--network", choices=("cnn", "tiny"), default="cnn")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    kinds = [(worker, "local") for worker in given.workers] + [(item, "ray") for item in given.ray]
    kinds += [(0, "stacked")] * given.stacked
    result: dict[tuple[int, str], list[Figures]] = {kind: [] for kind in kinds}
    for _ in range(given.turns):
        for (workers, backend), turns in result.items():
            turns.append(in_own_process(workers, backend, given.epochs, given.rounds, given.network))
    found = {turn["accuracy"] for (_, backend), turns in result.items() if backend != "stacked" for turn in turns}
    assert len(found) == 1, "the results differ"
    for turn in result.get((0, "stacked"), []):
        assert abs(turn["accuracy"] - min(found)) < 0.01, "the results of stacked models differ by more than rounding"
    print("| workers | processor s a round | to the first | wall s a round | to the first |\n|---|---|---|---|---|")
    first = result[kinds[0]]
    for (workers, backend), turns in result.items():
        cells = []
        for name in ("cpu", "wall"):
            ratios = [one[name] / other[name] for one, other in zip(turns, first, strict=True)]
            cells.append(f"{statistics.median(turn[name] for turn in turns):.2f}")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        name = {"local": f"{workers}", "ray": f"{workers} Ray", "stacked": "stacked"}[backend]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
