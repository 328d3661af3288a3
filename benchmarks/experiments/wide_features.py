"""Width, directions and rank of class statistics on wide features: accuracy and `linked`, the table of RESULTS.md.

    python benchmarks/experiments/wide_features.py features.npz --rows 600 5000 --dimensions 384 1024

`features.npz` is what `fleetdistill_lab.precompute` writes, or any data set of vectors. Test rows are other rows of the
training part, so that rules can be chosen on them; with --test, those of the test part. Five devices. Each setting is
D : rows_per_direction : rank; features with more than D numbers are projected, as in the product. Columns: kB of a
device, up and down; accuracy in %, all classes by the general answer / own classes by the personal one, of the closed
form and of the refined head after five gradients, as differences to the first setting, paired by seed: mean ± deviation
(worst seed); `linked` of a device with --linked-rows random rows, among 999 others of its class, with the 95 % Wilson
interval, by the strongest of the scores of `class_means.py`. The attacker has 400 public rows of each class.
With --controls, the tables of `one_exchange.py` for each setting instead, with every control.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from class_means import Attack, Pools, Sent, make_pools
from one_exchange import ROWS, exchange
from one_exchange_fleet import Fleet, Part
from one_exchange_tables import Found, print_tables
from refined_head import BOUNDED, closed_form_of, refined

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import projection
from fleetdistill.methods.classstats.shared_statistics import from_wire, max_directions, moments_of, to_wire
from fleetdistill_lab import Dataset, read_dataset
from fleetdistill_lab.audit.linkage import linkage
from fleetdistill_lab.simulation.data.datasets import stratified_rows
from fleetdistill_lab.simulation.data.partition import partition

DEVICES, TESTED, MIN_SAMPLES, STEPS = 5, 2500, 5, 5
HEAD = "refined, R 5, h <= 1, stop"
"""Row of the refined head; its fall is never so small here that it stops."""


@dataclass(frozen=True)
class Width:
    """A setting: D, minimum degrees of freedom per direction, and most directions."""

    dimensions: int
    rows_per_direction: int
    rank: int

    @classmethod
    def read(cls, text: str) -> Width:
        return cls(*map(int, text.split(":")))

    def most(self, df: int) -> int:
        """Directions that a device sends."""
        return max_directions(self.rank, df, self.dimensions, self.rows_per_direction)

    def __str__(self) -> str:
        return f"{self.dimensions}:{self.rows_per_direction}:{self.rank}"


def projected(rows_nf: Array, dimensions: int) -> Array:
    """`[n, D]` float64, as the product projects."""
    if rows_nf.shape[1] <= dimensions:
        return rows_nf.astype(np.float64)
    return np.asarray(rows_nf.astype(np.float64) @ projection(rows_nf.shape[1], dimensions))


def make_fleet(data: Dataset, width: Width, rows: int, alpha: float, seed: int, *, test: bool) -> Fleet:
    """Five devices with Dirichlet shares of each class."""
    labels = data.train_labels.numpy()
    chosen = stratified_rows(labels, rows, seed)
    dealt = partition("dirichlet_by_class", labels[chosen], DEVICES, seed, alpha=alpha).indices
    rest = np.setdiff1d(np.arange(len(labels)), chosen)
    images, of = (data.test_images, data.test_labels.numpy()) if test else (data.train_images[rest], labels[rest])
    some = stratified_rows(of, min(TESTED, len(of)), seed)

    def part(images: torch.Tensor, labels: Array) -> Part:
        return Part(images, projected(images.numpy(), width.dimensions), labels)

    parts = tuple(part(data.train_images[chosen[mine]], labels[chosen[mine]]) for mine in dealt)
    return Fleet(parts, part(images[some], of[some]), len(data.classes), seed)


def measure(fleet: Fleet, width: Width) -> dict[str, Any]:
    """Accuracies and bytes of both forms."""
    made = exchange(fleet, width.most)
    closed = closed_form_of(fleet, made, width.rows_per_direction)
    head = refined(fleet, made, [STEPS], BOUNDED)[STEPS]
    return {"closed": closed, "refined": head}


def print_controls(data: Dataset, width: Width, rows: int, alpha: float, seeds: Sequence[int], *, test: bool) -> None:
    """Every control and the refined head on the same fleets."""
    found: Found = {}
    for seed in seeds:
        fleet = make_fleet(data, width, rows, alpha, seed, test=test)
        found |= {(seed, row): compute(fleet) for row, compute in ROWS.items()}
        found[seed, HEAD] = measure(fleet, width)["refined"]
    print_tables(f"{data.name}, {rows} rows, {width}, alpha {alpha}", found, seeds, HEAD)


def attack(data: Dataset, width: Width, rows: int, seeds: Sequence[int]) -> str:
    """`linked` of devices with random rows."""
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    features = projected(torch.cat([data.train_images, data.test_images]).numpy(), width.dimensions)
    found = Attack()
    for seed in seeds:
        pools = make_pools(features, labels, rows, seed)
        found.add(pools, pools.known(), send(pools, width), seed)
    results = [linkage(scored) for scored in found.scored.values() if scored]
    worst = max(results, key=lambda one: one.linked)
    low, high = worst.interval
    return f"{worst.linked:.3f} [{low:.3f}, {high:.3f}]"


def send(pools: Pools, width: Width) -> Sent:
    """A device's message."""
    moments = moments_of(pools.features[pools.members], pools.labels[pools.members], MIN_SAMPLES)
    wire = to_wire(moments, width.rank, width.rows_per_direction)
    directions = np.zeros((0, pools.features.shape[1]))
    if wire.directions is not None and wire.steps is not None:
        directions = wire.directions.astype(np.float64) * wire.steps.astype(np.float64)[:, None]
    return Sent(pools.members, from_wire(wire), directions)


def paired(found: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], form: str) -> str:
    """Differences of one form to the other's closed form, on all and own classes."""
    cells = []
    for what in ("all", "own"):
        less = [100 * (one[form][what] - two["closed"][what]) for one, two in zip(found, other, strict=True)]
        cells.append(f"{np.mean(less):+.1f} ± {np.std(less, ddof=1) if len(less) > 1 else 0:.1f} ({min(less):+.1f})")
    return " / ".join(cells)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--widths", nargs="+", default=["384:15:128", "1024:15:128"], metavar="D:ROWS:RANK")
    parser.add_argument("--rows", type=int, nargs="*", default=[5000])
    parser.add_argument("--alphas", type=float, nargs="*", default=[0.5, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--controls", action="store_true", help="every control instead")
    parser.add_argument("--test", action="store_true", help="test on the test part")
    parser.add_argument("--linked-rows", type=int, nargs="*", default=[], help="attack devices with so many rows")
    given = parser.parse_args()
    data, widths = read_dataset(given.features), [Width.read(text) for text in given.widths]
    for rows in given.rows:
        for alpha in given.alphas:
            if given.controls:
                for width in widths:
                    print_controls(data, width, rows, alpha, given.seeds, test=given.test)
                continue
            print(f"\n{rows} rows, alpha {alpha}, seeds {given.seeds}\n")
            print("| D:rows:rank | closed form | refined | closed less the first | refined less the first | kB |")
            print("|---|---|---|---|---|---|")
            first: list[dict[str, Any]] = []
            for width in widths:
                found = [
                    measure(make_fleet(data, width, rows, alpha, seed, test=given.test), width) for seed in given.seeds
                ]
                first = first or found
                means = [
                    " / ".join(f"{100 * np.mean([one[form][what] for one in found]):.1f}" for what in ("all", "own"))
                    for form in ("closed", "refined")
                ]
                kb = ", ".join(f"{np.mean([one[form]['kb'] for one in found]):.0f}" for form in ("closed", "refined"))
                less = [paired(found, first, form) for form in ("closed", "refined")]
                print(f"| {width} | {means[0]} | {means[1]} | {less[0]} | {less[1]} | {kb} |", flush=True)
    for rows in given.linked_rows:
        print(f"\nlinked, {rows} rows a device\n")
        for width in widths:
            print(f"| {width} | {attack(data, width, rows, given.seeds)} |", flush=True)


if __name__ == "__main__":
    main()
