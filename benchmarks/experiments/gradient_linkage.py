"""How many rows the gradient sums of a refined head give away beside the class means: a table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=data python benchmarks/experiments/gradient_linkage.py fashion-mnist mnist

28x28 images, devices with 300 random rows each; merge, head, steps and rounding are the product's, with the settings of
classstats. Pools of rows are those of class_means.py: up to 300 rows of the devices of a sum are attacked among 999 of
their class that nobody has; the attacker has 400 more of each class, and knows the head of every step.

A row x of class y adds e xT to what the server has: to the class sums with e = e_y, to the gradient of step r with
e = softmax(W_r x) - e_y. All of them stacked, with the differences between steps therefore, are attacked by the ratio
of two likelihoods: the sum of n rows is taken as normal, with mean and covariance of public rows of its classes.
`means` are the class sums alone as an audit attacks them; `0 steps` the same by this attack. A sum of several devices
is what the secure sums of classstats_summed show. The covariance's weight was chosen on seed 0.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from class_means import ROWS, Pools, deal, make_pools, send
from one_exchange_fleet import Features

from fleetdistill.knowledge import Array, LinearHead
from fleetdistill.methods.classstats.class_space import shrinkage_rule
from fleetdistill.methods.classstats.refined_head import GradientSum, from_wire, gradient_sum, to_wire
from fleetdistill.methods.classstats.shared_statistics import in_float16, merge
from fleetdistill_lab.audit.gradient_sums import likelihood_ratios, stack
from fleetdistill_lab.audit.knowledge import PublicMoments
from fleetdistill_lab.audit.linkage import Scored, linkage
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.methods.classstats.refinement import (
    Refinement,
    mean_of_rows,
    usual_objective,
)

ATTACKED, CLASSES = 300, 10
SUMS = (1, 2, 5, 20)
STEPS = (0, 1, 3, 5)


def heads_and_gradients(
    pools: Pools, devices: Sequence[Array], summed: int, steps: int
) -> tuple[list[LinearHead], list[Array]]:
    """The heads of a fleet's steps, and at each the sum of the first devices' gradients, as the server has them."""
    moments = merge([send(pools, rows).moments for rows in devices])
    mean = in_float16(mean_of_rows(moments), "mean")
    refinement = Refinement(usual_objective(moments, mean, shrinkage_rule(moments.dimensions, moments.df)))
    heads, gradients = [], []
    for _ in range(steps):
        weights = in_float16(refinement.weights, "weights")
        head = LinearHead(labels=list(moments.labels), counts=moments.counts, mean=mean, weights=weights)
        sums = []
        for rows in devices:
            sent = to_wire(gradient_sum(head, pools.features[rows], pools.labels[rows], range(CLASSES)), head, CLASSES)
            narrow = in_float16(sent.gradient, "gradient")
            sums.append(from_wire(sent.__class__(**{**vars(sent), "gradient": narrow}), head))
        heads.append(head)
        gradients.append(np.sum([one.gradient for one in sums[:summed]], axis=0))
        whole = GradientSum(
            np.sum([one.gradient for one in sums], axis=0), sum(one.loss for one in sums), sum(one.rows for one in sums)
        )
        refinement.step(weights, whole)
    return heads, gradients


def attacked(pools: Pools, size: int, seed: int) -> Iterator[tuple[str, Scored]]:
    """Yields the scores of up to 300 rows of a sum of devices and of their decoys, by attack."""
    devices = deal(pools, max(size, 5), math.inf, seed)
    heads, gradients = heads_and_gradients(pools, devices, size, max(STEPS))
    members = np.concatenate(devices[:size])
    mean, of_member = heads[0].mean.astype(np.float64), pools.labels[members]
    x = np.column_stack([pools.features[members] - mean, np.ones(len(members))])
    sums, counts = np.eye(CLASSES)[of_member].T @ x, np.bincount(of_member, minlength=CLASSES)
    seen = np.concatenate([sums, *(gradient + sums for gradient in gradients)])
    own = members[np.random.default_rng([seed, 2]).permutation(len(members))[:ATTACKED]]
    rows = np.concatenate([own, pools.decoys])
    labels, decoys = pools.labels[rows], pools.labels[pools.decoys]
    known = PublicMoments(pools.features[pools.public], pools.labels[pools.public])
    found = {"means": np.zeros(len(rows))}
    for c in range(CLASSES):
        sent = pools.features[members[of_member == c]].mean(axis=0)
        found["means"][labels == c] = known.leaning(pools.features[rows[labels == c]], sent, c, counts[c])
    for steps in STEPS:
        both = (stack(heads, pools.features[at], pools.labels[at], CLASSES) for at in (rows, pools.public))
        used = CLASSES * (1 + steps)
        own_stack, public = (replace(one, e=one.e[:, :used]) for one in both)
        found[f"{steps} steps"] = likelihood_ratios(own_stack, public, seen[:used], counts)
    for attack, values in found.items():
        for place, label in enumerate(labels[: len(own)]):
            yield attack, Scored(float(values[place]), values[len(own) :][decoys == label])


def measure(name: str, seeds: Sequence[int], dimensions: int | None) -> None:
    """Prints the rows of the table for a data set."""
    data = load_dataset(name)
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    features = Features(images, dimensions).of(np.arange(len(labels))).astype(np.float64)
    for size in SUMS:
        scored: dict[str, list[Scored]] = {}
        for seed in seeds:
            for attack, one in attacked(make_pools(features, labels, max(size, 5) * ROWS, seed), size, seed):
                scored.setdefault(attack, []).append(one)
        print(f"| {name} | {size} | {' | '.join(map(_cell, scored.values()))} |", flush=True)


def _cell(scored: Sequence[Scored]) -> str:
    result = linkage(scored)
    low, high = result.interval
    return f"{result.linked:.3f} [{low:.3f}, {high:.3f}], auc {result.auc:.3f}"


def main() -> None:
    """Measures the data sets."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion-mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--dimensions", type=int, help="D; 384 by default")
    given = parser.parse_args()
    print(f"| data | devices in the sum | means | {' | '.join(f'{steps} steps' for steps in STEPS)} |")
    print(f"|{'---|' * (3 + len(STEPS))}")
    for name in given.datasets:
        measure(name, given.seeds, given.dimensions)


if __name__ == "__main__":
    main()
