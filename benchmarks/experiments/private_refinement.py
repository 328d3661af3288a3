"""Does a refined head pay under a privacy budget? The closed form with all of it, or with a part and a head.

    FLEETDISTILL_DATA=... python benchmarks/experiments/private_refinement.py fashion-mnist mnist

The best case for the head: all noise is that of a sum, once (classstats_secure), drawn as floats, and no device drops
out. The closed form's rows, sums, noise and merge are those of `secure_statistics.py`. With a head, the sum gets
`share` of mu squared, and R gradients the rest in equal parts: Gaussian releases compose in mu squared. Gradients are
those of `refined_head.py`'s objective with centre 0: a row's part is (softmax - e_y) xT with x = (sqrt(F) u, 1) and
|u| = 1, so its length is at most sqrt(2 (F + 1)), exactly, and the noise of each number has this divided by the
gradient's mu. The loss is not sent. `pairs` are L-BFGS's, without them each step is that of the Hessian at 0. Accuracy
on all classes in %, mean over seeds less the closed form's: mean ± deviation (worst seed).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from private_statistics import DELTA, SEEDS, accuracy, dealt, features, merged_moments, mu_of

from fleetdistill.knowledge import Array, LinearHead
from fleetdistill.methods.classstats.class_space import make_space
from fleetdistill.methods.classstats.refined_head import GradientSum, gradient_sum
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.methods.classstats.refinement import Refinement, usual_objective

FLEETS = ((20, 600), (100, 600))
EPSILONS = (math.inf, 10.0, 3.0, 1.0)
SHARES = (0.3, 0.5, 0.7)
STEPS = (1, 2, 5)


def head_accuracy(
    train: Array, labels: Array, own: Array, test: Array, test_labels: Array, mu: float, seed: int, **how: float
) -> float:
    """Accuracy of the head whose last weights are reached by noisy gradients; chance without a merge."""
    share, steps, pairs = how["share"], int(how["steps"]), bool(how["pairs"])
    moments = merged_moments(train, labels, [own], mu * math.sqrt(share), seed)
    if moments is None or len(moments.labels) < 2:
        return 0.1
    generator, size = np.random.default_rng([seed, 7]), train.shape[1]
    deviation = math.sqrt(2 * (size + 1)) / (mu * math.sqrt((1 - share) / steps))
    zero = np.zeros(size)
    refinement = Refinement(usual_objective(moments, zero, 0.0))
    units = train[own] / np.linalg.norm(train[own], axis=1, keepdims=True) * math.sqrt(size)
    for _ in range(steps):
        if not pairs:
            refinement.restart()
        weights = refinement.weights
        head = LinearHead(labels=list(moments.labels), counts=moments.counts, mean=zero, weights=weights)
        exact = gradient_sum(head, units, labels[own], moments.labels)
        noisy = exact.gradient + generator.normal(0, deviation, exact.gradient.shape)
        refinement.step(weights, GradientSum(noisy, 0.0, exact.rows))
    final = refinement.weights
    rows = np.column_stack([test / np.linalg.norm(test, axis=1, keepdims=True) * math.sqrt(size), np.ones(len(test))])
    return float((np.array(moments.labels)[(rows @ final.T).argmax(axis=1)] == test_labels).mean())


def closed_accuracy(
    train: Array, labels: Array, own: Array, test: Array, test_labels: Array, mu: float, seed: int
) -> float:
    moments = merged_moments(train, labels, [own], mu, seed)
    space = None if moments is None else make_space(moments, shrinkage=0.0)
    return accuracy(space, test, test_labels)


def paired(found: Sequence[float], other: Sequence[float]) -> str:
    less = 100 * (np.array(found) - np.array(other))
    return f"{less.mean():+.1f} ± {less.std(ddof=1):.1f} ({less.min():+.1f})"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion-mnist"])
    given = parser.parse_args()
    settings = [(pairs, share, steps) for pairs in (1, 0) for share in SHARES for steps in STEPS]
    print(f"delta {DELTA:g}, seeds {list(SEEDS)}; rows of 10 classes, equal shares\n")
    for name in given.datasets:
        data = load_dataset(name)
        train, test = features(data.train_images), features(data.test_images)
        labels, test_labels = data.train_labels.numpy(), data.test_labels.numpy()
        for devices, rows in FLEETS:
            owned = [np.concatenate(dealt(labels, devices, rows, math.inf, seed)) for seed in SEEDS]
            print(f"\n{name}, {devices} devices of {rows} rows\n")
            print("| head: pairs, share, R |", *(f"epsilon {epsilon:g} |" for epsilon in EPSILONS))
            print("|---|" + "---|" * len(EPSILONS))
            closed = {
                epsilon: [
                    closed_accuracy(train, labels, own, test, test_labels, mu_of(epsilon), seed)
                    for seed, own in zip(SEEDS, owned, strict=True)
                ]
                for epsilon in EPSILONS
            }
            print("| closed form |", *(f"{100 * np.mean(closed[epsilon]):.1f} |" for epsilon in EPSILONS), flush=True)
            for pairs, share, steps in settings:
                cells = []
                for epsilon in EPSILONS:
                    found = [
                        head_accuracy(
                            train,
                            labels,
                            own,
                            test,
                            test_labels,
                            mu_of(epsilon),
                            seed,
                            share=share,
                            steps=steps,
                            pairs=pairs,
                        )
                        for seed, own in zip(SEEDS, owned, strict=True)
                    ]
                    cells.append(f"{paired(found, closed[epsilon])} |")
                print(f"| {'with' if pairs else 'without'}, {share:g}, {steps} |", *cells, flush=True)


if __name__ == "__main__":
    main()
