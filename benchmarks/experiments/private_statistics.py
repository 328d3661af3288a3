"""Accuracy of private class statistics by epsilon, devices and rows: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=... python benchmarks/experiments/private_statistics.py fashion-mnist mnist
    FLEETDISTILL_DATA=... python benchmarks/experiments/private_statistics.py --drawn fashion-mnist

Extractor, sums, merge and models are the product's. The noise is drawn as floats with the variance of exact noise, so
that thousands of releases take seconds. General: the closed form of the merge, which the server and every device have.
Personal: the mean over devices, on the test set in each device's class shares (Dirichlet partitions by class).

`--drawn` compares the closed form with predictors of 64 hidden units that devices train on own and drawn rows: in the
class space, as the product's `predictor = "trained"`, and on all 64 numbers, of rows mean + R z with R Rᵀ = covariance.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space
from fleetdistill.methods.classstats.exchange import class_variants
from fleetdistill.methods.classstats.shared_statistics import Moments, moments_of
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.methods.classstats_private.merge import merge_private, strength
from fleetdistill.methods.classstats_private.public_features import private_extractor
from fleetdistill.methods.classstats_private.sums import NoiseScale, class_sums, on_grid, release_rounded, unit_rows
from fleetdistill.privacy.accountant import discrete_mu_for
from fleetdistill_lab.simulation.data.datasets import load_dataset

EPSILONS = (math.inf, 10.0, 3.0, 1.0, 0.3)
FLEETS = ((5, 300), (5, 600), (5, 3000), (20, 100), (20, 600), (20, 3000))
ALPHAS = (0.5, 0.1)
SEEDS = (0, 1, 2)
CLASSES, DELTA, BATCH = 10, 1e-5, 500
PASSES, DRAWN = 20, 2000
_NO_NOISE = 1e6


def features(images: torch.Tensor, dimensions: int = ClassStatsPrivateConfig.dimensions) -> Array:
    """Returns the public features of images, `[n, dimensions]` float64."""
    extractor = private_extractor("scattering", None, tuple(images.shape[1:]), dimensions).eval()
    with torch.no_grad():
        return torch.cat([extractor(batch) for batch in images.split(BATCH)]).double().numpy()


def mu_of(epsilon: float) -> float:
    """Returns the mu of exact noise; one without noise for an infinite epsilon."""
    return discrete_mu_for(epsilon, DELTA) if math.isfinite(epsilon) else _NO_NOISE


def merged_moments(rows: Array, labels: Array, devices: Sequence[Array], mu: float, seed: int) -> Moments | None:
    """Returns the merge of the devices' releases; None if the noise leaves no class."""
    generator = np.random.default_rng(seed)
    units = on_grid(unit_rows(rows))
    parts = [release_rounded(class_sums(units[own], labels[own], CLASSES), mu, generator) for own in devices]
    result = merge_private(parts, [NoiseScale.of(mu)] * len(parts))
    if result is None:
        return None
    counts, size = np.maximum(np.rint(result.counts), 1).astype(np.int64), rows.shape[1]
    return Moments(
        labels=tuple(result.labels.tolist()),
        counts=counts,
        means=result.means * math.sqrt(size),
        covariance=result.covariance * size,
        df=max(int(counts.sum()) - len(counts), 1),
    )


def merged_space(rows: Array, labels: Array, devices: Sequence[Array], mu: float, seed: int) -> ClassSpace | None:
    """Returns the class space of the devices' releases; None if the noise leaves no two classes."""
    moments = merged_moments(rows, labels, devices, mu, seed)
    try:
        return None if moments is None else make_space(moments, shrinkage=0.0)
    except KnowledgeError:
        return None


def accuracy(space: ClassSpace | None, rows: Array, labels: Array) -> float:
    """Returns the accuracy of the nearest class mean; chance without a space."""
    if space is None:
        return 1 / CLASSES
    return float((logits(space, coordinates(space, rows), CLASSES).argmax(axis=1) == labels).mean())


def dealt(labels: Array, devices: int, rows: int, alpha: float, seed: int) -> list[Array]:
    """Returns each device's rows; Dirichlet shares of every class, or equal ones for an infinite alpha."""
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(labels))[: devices * rows]
    if not math.isfinite(alpha):
        return list(chosen.reshape(devices, rows))
    result: list[list[int]] = [[] for _ in range(devices)]
    for label in range(CLASSES):
        of_class = chosen[labels[chosen] == label]
        cuts = (np.cumsum(generator.dirichlet([alpha] * devices)) * len(of_class)).astype(int)[:-1]
        for own, part in zip(result, np.split(of_class, cuts), strict=True):
            own.extend(part.tolist())
    return [np.array(own, dtype=int) for own in result if len(own) >= 2]


def personal_accuracy(space: ClassSpace, own: Array, own_labels: Array, rows: Array, labels: Array) -> float:
    """Returns the accuracy of a device's personal model on the test set in the device's class shares."""
    counted = [label for label in np.unique(own_labels).tolist() if label in space.labels]
    variant = class_variants(space, own, own_labels, counted, CLASSES, moments_of(own, own_labels)).personal
    result = logits(variant.space, coordinates(variant.space, rows), CLASSES) / variant.temperature
    right = (result + np.log(variant.prior)).argmax(axis=1) == labels
    weight = (np.bincount(own_labels, minlength=CLASSES) / np.bincount(labels, minlength=CLASSES))[labels]
    return float((right * weight).sum() / weight.sum())


def trained(own: Array, labels: Array, drawn: Array, drawn_labels: Array, test: Array, seed: int) -> Array:
    """Returns the classes that a predictor gives the test rows; it is trained on own and drawn rows, 20 passes."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(own.shape[1], 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    (x, xs, test_x), (y, ys) = (
        (torch.tensor(item).float() for item in (own, drawn, test)),
        map(torch.tensor, (labels, drawn_labels)),
    )
    for number in range(PASSES):
        optimizer.param_groups[0]["lr"] = 0.02 * 0.1 ** (number / (PASSES - 1))
        for batch in torch.randperm(len(x)).split(32):
            other = torch.randint(len(xs), (len(batch),))
            loss = functional.cross_entropy(net(x[batch]), y[batch]) + functional.cross_entropy(
                net(xs[other]), ys[other]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return net(test_x).argmax(dim=1).numpy()


def drawn_row(
    train: Array, labels: Array, test: Array, test_labels: Array, alpha: float, epsilon: float
) -> list[float]:
    """Returns the devices' mean accuracy on all classes: closed form, trained in the space, and on all numbers."""
    result = []
    for seed in SEEDS:
        devices = dealt(labels, 5, 600, alpha, seed)
        moments = merged_moments(train, labels, devices, mu_of(epsilon), seed)
        assert moments is not None
        space, root = make_space(moments, shrinkage=0.0), np.linalg.cholesky(moments.covariance)
        random, classes = np.random.default_rng(seed), np.repeat(np.arange(len(moments.labels)), DRAWN)
        noise = random.normal(size=(len(classes), train.shape[1]))
        flat = random.normal(size=(len(classes), space.centres.shape[1]))
        whole, spaced = moments.means[classes] + noise @ root.T, space.centres[classes] + flat
        drawn_labels = np.array(moments.labels)[classes]
        closed = logits(space, coordinates(space, test), CLASSES).argmax(axis=1)
        for own in devices:
            v, test_v = coordinates(space, train[own]), coordinates(space, test)
            guesses = [
                closed,
                trained(v, labels[own], spaced, drawn_labels, test_v, seed),
                trained(train[own], labels[own], whole, drawn_labels, test, seed),
            ]
            result.append([float((guess == test_labels).mean()) for guess in guesses])
    return [100 * float(item) for item in np.mean(result, axis=0)]


def print_drawn(name: str, train: Array, labels: Array, test: Array, test_labels: Array) -> None:
    """Prints the table of `--drawn`."""
    print("| data | epsilon | closed form | trained in the space | trained on all numbers |")
    for alpha in (0.5, 0.1):
        for epsilon in (10.0, 3.0, 1.0):
            row = drawn_row(train, labels, test, test_labels, alpha, epsilon)
            print(f"| {name}, alpha {alpha:g} | {epsilon:g} |", *(f"{item:.1f} |" for item in row), flush=True)


def print_personal(
    name: str, train: Array, labels: Array, test: Array, test_labels: Array, devices: int, rows: int, alpha: float
) -> None:
    """Prints one row of the table of general and personal answers."""
    cells = []
    for epsilon in EPSILONS:
        general, personal = [], []
        for seed in SEEDS:
            own = dealt(labels, devices, rows, alpha, seed)
            space = merged_space(train, labels, own, mu_of(epsilon), seed)
            general.append(accuracy(space, test, test_labels))
            personal += [
                personal_accuracy(space, train[item], labels[item], test, test_labels) if space else math.nan
                for item in own
            ]
        cells.append(f"{100 * np.mean(general):.1f} / {100 * np.nanmean(personal):.1f}")
    print(f"| {name}, alpha {alpha:g} | {devices} | {rows} |", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    """Prints both tables of each data set as Markdown."""
    torch.set_num_threads(1)
    drawn = "--drawn" in sys.argv
    if not drawn:
        print("| data | devices | rows a device |", *(f"{e:g} |" for e in EPSILONS))
    for name in (item for item in sys.argv[1:] if item != "--drawn"):
        data = load_dataset(name, data_dir=Path(os.environ["FLEETDISTILL_DATA"]))
        train, test = features(data.train_images), features(data.test_images)
        labels, test_labels = data.train_labels.numpy(), data.test_labels.numpy()
        if drawn:
            print_drawn(name, train, labels, test, test_labels)
            continue
        for devices, rows in FLEETS:
            cells = []
            for epsilon in EPSILONS:
                mu = mu_of(epsilon)
                fleets = [dealt(labels, devices, rows, math.inf, seed) for seed in SEEDS]
                spaces = [merged_space(train, labels, own, mu, seed) for own, seed in zip(fleets, SEEDS, strict=True)]
                mean = np.mean([accuracy(space, test, test_labels) for space in spaces])
                cells.append(f"{100 * mean:.1f}" + (f" ({strength(rows, [mu] * devices):.0f})" if mu < 10 else ""))
            print(f"| {name} | {devices} | {rows} |", *(f"{cell} |" for cell in cells), flush=True)
        for devices, rows in FLEETS:
            for alpha in ALPHAS:
                print_personal(name, train, labels, test, test_labels, devices, rows, alpha)


if __name__ == "__main__":
    main()
