"""One hostile device of ten in the gradient sums of a refined head, with and without the checks of `robust`.

    FLEETDISTILL_DATA=data python benchmarks/experiments/hostile_gradients.py digits fashion-14 cifar10

The device sends honest class statistics, so that it is merged, and then false sums. Merge, head, steps, checks and
rounding are the product's; everything runs in one process. Accuracy on all classes in %, mean and worst over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from one_exchange_fleet import Fleet, Part, Setting, accuracies, make_fleet

from fleetdistill.knowledge import Array, ClassSpace, LinearHead
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.refined_head import GradientSum, from_wire, gradient_sum, to_wire
from fleetdistill.methods.classstats.shared_statistics import Moments, in_float16, merge, moments_of
from fleetdistill.methods.classstats.shared_statistics import from_wire as statistics_from_wire
from fleetdistill.methods.classstats.shared_statistics import to_wire as statistics_to_wire
from fleetdistill_server.methods.classstats.refinement import (
    GradientChecks,
    Refinement,
    mean_of_rows,
    space_of_head,
    usual_objective,
    why_refused,
)

CONFIG = ClassStatsConfig()
SETTINGS = {
    "digits": Setting("digits", devices=10, train_limit=900),
    "fashion-14": Setting("fashion-mnist", 14, devices=10, train_limit=3000),
    "cifar10": Setting("cifar10", devices=10, train_limit=2500),
}
Lie = Callable[[GradientSum, LinearHead, Part, Moments], GradientSum]


def times(factor: float) -> Lie:
    return lambda honest, *_: honest._replace(gradient=factor * honest.gradient)


def random(honest: GradientSum, head: LinearHead, part: Part, sent: Moments) -> GradientSum:
    """Random numbers of the same size whose columns add up to 0."""
    numbers = np.random.default_rng(honest.rows).normal(0, honest.gradient.std(), honest.gradient.shape)
    return honest._replace(gradient=numbers - numbers.mean(axis=0))


def flips(honest: GradientSum, head: LinearHead, part: Part, sent: Moments) -> GradientSum:
    """The sums of the rows with each label replaced by the next of the device's."""
    kept = np.isin(part.labels, sent.labels)
    following = dict(zip(sent.labels, sent.labels[1:] + sent.labels[:1], strict=True))
    labels = np.array([following[label] for label in part.labels[kept].tolist()])
    return gradient_sum(head, part.features[kept], labels, sent.labels)


LIES: dict[str, Lie | None] = {
    "none": None,
    "gradient x -1": times(-1),
    "gradient x -5": times(-5),
    "gradient x 5": times(5),
    "gradient x 1000": times(1000),
    "random gradient": random,
    "loss 0": lambda honest, *_: honest._replace(loss=0.0),
    "next labels": flips,
}


def refined(fleet: Fleet, lie: Lie | None, checked: bool) -> tuple[ClassSpace, ClassSpace, set[int]]:
    """The refined space, the closed form's, and the devices whose sums were left out; the first one lies."""
    sent = [_statistics(part) for part in fleet.parts]
    merged = merge([moments for moments in sent if moments.labels])
    mean = in_float16(mean_of_rows(merged), "mean")
    shrinkage = shrinkage_rule(merged.dimensions, merged.df)
    objective = usual_objective(merged, mean, shrinkage)
    refinement = Refinement(objective)
    taking = [number for number, moments in enumerate(sent) if moments.labels]
    checks = {number: GradientChecks(sent[number], sent[number].labels, objective.labels, mean) for number in taking}
    hostile, refused = taking[0], set[int]()
    for _ in range(CONFIG.refine_steps):
        weights = in_float16(refinement.weights, "weights")
        head = LinearHead(labels=list(merged.labels), counts=merged.counts, mean=mean, weights=weights)
        sums = {}
        for number in taking:
            part = fleet.parts[number]
            own = gradient_sum(head, part.features, part.labels, sent[number].labels)
            if lie is not None and number == hostile:
                own = lie(own, head, part, sent[number])
            wire = to_wire(own, head, fleet.classes)
            received = from_wire(replace(wire, gradient=in_float16(wire.gradient, "gradient")), head)
            if why_refused(received, weights.shape) or (checked and checks[number].why_refused(weights, received)):
                refused.add(number)
            else:
                sums[number] = received
        if list(sums) != taking and refinement.values:
            refinement.restart()
        taking = list(sums)
        refinement.step(weights, _whole(list(sums.values())))
    final = in_float16(refinement.final(), "weights")
    return space_of_head(objective, final, merged.df, shrinkage), make_space(merged, shrinkage), refused


def _statistics(part: Part) -> Moments:
    own = moments_of(part.features.astype(np.float64), part.labels, CONFIG.min_samples)
    return statistics_from_wire(statistics_to_wire(own, CONFIG.rank, CONFIG.rows_per_direction))


def _whole(sums: Sequence[GradientSum]) -> GradientSum:
    gradient: Array = np.sum([one.gradient for one in sums], axis=0)
    return GradientSum(gradient, sum(one.loss for one in sums), sum(one.rows for one in sums))


def _accuracy(fleet: Fleet, space: ClassSpace) -> float:
    found = logits(space, coordinates(space, fleet.test.features), fleet.classes)
    return 100 * accuracies(fleet, [found] * len(fleet.parts))[0]


def measure(name: str, seeds: Sequence[int]) -> None:
    """Prints the rows of the table for a data set."""
    fleets = [make_fleet(SETTINGS[name], seed) for seed in seeds]
    for attack, lie in LIES.items():
        both = [[refined(fleet, lie, checked) for fleet in fleets] for checked in (False, True)]
        cells = []
        for results in both:
            found = [_accuracy(fleet, space) for fleet, (space, _, _) in zip(fleets, results, strict=True)]
            cells.append(f"{np.mean(found):.1f} ({min(found):.1f})")
        closed = np.mean([_accuracy(fleet, space) for fleet, (_, space, _) in zip(fleets, both[0], strict=True)])
        caught = sum(bool(refused) for _, _, refused in both[1])
        honest = sum(max(len(refused) - 1, 0) if lie else len(refused) for _, _, refused in both[1])
        left_out = f"{caught} of {len(fleets)}, {honest} honest"
        print(f"| {name} | {attack} | {' | '.join(cells)} | {closed:.1f} | {left_out} |", flush=True)


def main() -> None:
    """Measures the data sets."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    print(
        "| data | the hostile device sends | unchecked | checked | closed form | left out |\n|---|---|---|---|---|---|"
    )
    for name in given.names:
        measure(name, given.seeds)


if __name__ == "__main__":
    main()
