"""How many rows a sum of n devices' class statistics gives away: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=data python benchmarks/experiments/secure_linkage.py fashion-mnist mnist

28x28 images, devices with 300 random rows each; features, encoding, noise and attacks are the product's. Pools of rows
are those of class_means.py: for each sum up to 300 rows of its devices, and for each row 999 of its class that nobody
has; the attacker has 400 more of each class. Sums without noise are those of classstats_summed: each device's
second moment is limited to what classstats sends of it, so that one device shows what its message of classstats does.
Sums with noise are those of classstats_secure, with the shares that its rule counts on, drawn as floats.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from class_means import CLASSES, ROWS, SUMS, Pools, deal, make_pools
from one_exchange_fleet import Features
from private_statistics import features as private_features
from private_statistics import mu_of

from fleetdistill.knowledge import Array, ClassSums
from fleetdistill.methods.classstats_private.sums import class_sums, on_grid, release_rounded, to_wire, unit_rows
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig, ClassStatsSummedConfig
from fleetdistill.methods.classstats_secure.encoding import decode, limited_numbers, rows_in_steps
from fleetdistill_lab.audit.audit import bound
from fleetdistill_lab.audit.knowledge import sums_scores
from fleetdistill_lab.audit.linkage import Scored, linkage
from fleetdistill_lab.simulation.data.datasets import load_dataset

ATTACKED = 300
EPSILONS = (10.0, 1.0)
SIZES = {"no noise": SUMS, **{f"epsilon {epsilon:g}": tuple(size for size in SUMS if size > 2) for epsilon in EPSILONS}}
"""Numbers of devices by what the server sees; a private sum has at least three."""


def plain_sum(pools: Pools, devices: Sequence[Array]) -> ClassSums:
    """The sum of the devices' numbers in classstats_summed."""
    config = ClassStatsSummedConfig()
    parameters = config.parameters_for(len(devices), CLASSES, pools.features.shape[1])
    total = np.zeros(parameters.numbers, dtype=np.int64)
    for rows in devices:
        total += limited_numbers(
            rows_in_steps(pools.features[rows], parameters)[0],
            pools.labels[rows],
            CLASSES,
            parameters.grid_bits,
            min_samples=config.min_samples,
            rank=config.rank,
            rows_per_direction=config.rows_per_direction,
        )
    return to_wire(decode(total, parameters), 0.0, discrete=True)


def private_sum(pools: Pools, devices: Sequence[Array], epsilon: float, seed: int) -> ClassSums:
    """The sum of the devices' numbers with the noise of all of them."""
    rows, size = np.concatenate(devices), len(devices)
    mu = mu_of(epsilon) * math.sqrt(ClassStatsSecureConfig(epsilon=epsilon).honest(size) / size)
    sums = class_sums(on_grid(unit_rows(pools.features[rows])), pools.labels[rows], CLASSES)
    return to_wire(release_rounded(sums, mu, np.random.default_rng([seed, 4])), mu, discrete=True)


def attacked(pools: Pools, part: ClassSums, seed: int) -> Iterator[tuple[str, Scored]]:
    """Yields the scores of up to 300 rows of the sum and of their decoys, by attack."""
    own = pools.members[np.random.default_rng([seed, 2]).permutation(len(pools.members))[:ATTACKED]]
    rows = np.concatenate([own, pools.decoys])
    labels, decoys = pools.labels[rows], pools.labels[pools.decoys]
    features, public = pools.features[rows], pools.features[pools.public]
    for attack, scores in sums_scores(part, features, labels, public, pools.labels[pools.public]).items():
        for row, label in enumerate(labels[: len(own)]):
            yield attack, Scored(float(scores[row]), scores[len(own) :][decoys == label])


def measure(name: str, seeds: Sequence[int]) -> None:
    """Prints the rows of the table for a data set."""
    data = load_dataset(name)
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    usual, private = Features(images, None).of(np.arange(len(labels))), private_features(images)
    for what, sizes in SIZES.items():
        for size in sizes:
            scored: dict[str, list[Scored]] = {}
            for seed in seeds:
                pools = make_pools(usual if what == "no noise" else private, labels, size * ROWS, seed)
                devices = deal(pools, size, math.inf, seed)
                if what == "no noise":
                    part = plain_sum(pools, devices)
                else:
                    part = private_sum(pools, devices, float(what.split()[1]), seed)
                for attack, one in attacked(pools, part, seed):
                    scored.setdefault(attack, []).append(one)
            most = "–" if part.mu == 0 else f"{bound(0.001, part.mu):.4f}"
            cells = " | ".join(_cell(attack, one) for attack, one in scored.items())
            print(f"| {name} | {what} | {size} | {cells} | {most} |", flush=True)


def _cell(attack: str, scored: Sequence[Scored]) -> str:
    result = linkage(scored)
    low, high = result.interval
    return f"{attack} {result.linked:.3f} [{low:.3f}, {high:.3f}], auc {result.auc:.3f}"


def main() -> None:
    """Measures the data sets."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion-mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5], help="the scores were chosen on 0 and 1")
    given = parser.parse_args()
    for name in given.datasets:
        measure(name, given.seeds)


if __name__ == "__main__":
    main()
