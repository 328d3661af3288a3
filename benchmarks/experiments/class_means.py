"""How many rows of a device its class means give away, and what lowers that: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=data python benchmarks/experiments/class_means.py fashion-mnist mnist

28x28 images, features and messages of the product's defaults. For each message up to 300 rows behind it, and for
each row 999 of its class that nobody trained on; the attacker has 400 more of each class. `means` and `directions` are
the scores of `fleetdistill audit`, `plain` that of the means with one covariance for all classes and without the term
in the row's length. Accuracy: the closed form of the merge, the general model, on 10,000 rows that nobody else has.

Fleets of five devices with 300 rows each: `equal` has random rows, `alpha 0.5` Dirichlet shares of each class and 300
rows on average. Means are shrunk towards the mean of the device's rows, by a fixed factor or by James-Stein's,
1 - tr W / (n |mean - centre|²), at least 0; an attacker who knows the rule estimates the factor from public means and
undoes it. Sums are those of several devices' messages, as a secure sum would show them. Noise is that of
classstats_private, drawn as floats with the variance of exact noise, on its 64 numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from one_exchange_fleet import Features
from private_statistics import merged_moments, mu_of

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge, moments_of, to_wire
from fleetdistill.methods.classstats_private.public_features import CONSTANTS
from fleetdistill.methods.classstats_private.sums import NoiseScale, class_sums, on_grid, release_rounded, unit_rows
from fleetdistill_lab.audit.knowledge import PublicMoments
from fleetdistill_lab.audit.linkage import Linkage, Scored, linkage
from fleetdistill_lab.simulation.data.datasets import load_dataset, stratified_rows
from fleetdistill_lab.simulation.data.partition import partition

ATTACKED, DECOYS, PUBLIC, TESTED, ROWS, CLASSES = 300, 999, 400, 10_000, 300, 10
SETTINGS = ClassStatsConfig()
MIN_SAMPLES = (5, 20, 40, 80)
FACTORS = (0.7, 0.5)
EPSILONS = (math.inf, 20.0, 10.0, 3.0)
SUMS = (1, 2, 5, 20)


@dataclass(frozen=True)
class Pools:
    """Features `[n, F]` and labels `[n]` of a data set, and who has which rows."""

    features: Array
    labels: Array
    members: Array
    decoys: Array
    public: Array
    tested: Array

    def known(self) -> PublicMoments:
        """What the attacker makes of its rows."""
        return PublicMoments(self.features[self.public], self.labels[self.public])


@dataclass(frozen=True)
class Sent:
    """What the server sees of some devices together: their rows, moments, directions `[q, F]`, and noise of a count."""

    rows: Array
    moments: Moments
    directions: Array
    noise: float = 0.0


def make_pools(features: Array, labels: Array, rows: int, seed: int) -> Pools:
    """Members, decoys, the attacker's rows and the test part, without common rows."""
    members = stratified_rows(labels, rows, seed)
    rest = np.random.default_rng([seed, 1]).permutation(np.setdiff1d(np.arange(len(labels)), members))
    pools = [rest[labels[rest] == label] for label in range(CLASSES)]
    decoys = np.concatenate([pool[:DECOYS] for pool in pools])
    public = np.concatenate([pool[DECOYS : DECOYS + PUBLIC] for pool in pools])
    return Pools(features, labels, members, decoys, public, np.setdiff1d(rest, [*decoys, *public])[:TESTED])


def deal(pools: Pools, devices: int, alpha: float, seed: int) -> list[Array]:
    """Each device's rows."""
    if math.isinf(alpha):
        return np.array_split(np.random.default_rng([seed, 3]).permutation(pools.members), devices)
    dealt = partition("dirichlet_by_class", pools.labels[pools.members], devices, seed, alpha=alpha)
    return [pools.members[rows] for rows in dealt.indices]


def send(pools: Pools, rows: Array, min_samples: int = SETTINGS.min_samples) -> Sent:
    """A device's message with the product's defaults."""
    moments = moments_of(pools.features[rows], pools.labels[rows], min_samples)
    wire = to_wire(moments, SETTINGS.rank, SETTINGS.rows_per_direction)
    if wire.directions is None or wire.steps is None:
        return Sent(rows, from_wire(wire), np.zeros((0, pools.features.shape[1])))
    return Sent(rows, from_wire(wire), wire.directions.astype(np.float64) * wire.steps.astype(np.float64)[:, None])


def add(parts: Sequence[Sent]) -> Sent:
    """What a secure sum of messages shows; it has no directions of single devices."""
    size = parts[0].moments.dimensions
    return Sent(
        np.concatenate([part.rows for part in parts]), merge([part.moments for part in parts]), np.zeros((0, size))
    )


def shrink(sent: Sent, factor: float | None) -> Sent:
    """The same message with means moved towards their common mean; None for James-Stein's factor of each class."""
    moments = sent.moments
    centre = moments.counts @ moments.means / moments.counts.sum()
    away = moments.means - centre
    if factor is None:
        spread = np.trace(moments.covariance) / (moments.counts * np.square(away).sum(axis=1))
        factors = np.maximum(1 - spread, 0)
    else:
        factors = np.full(len(away), factor)
    return dataclasses.replace(sent, moments=dataclasses.replace(moments, means=centre + factors[:, None] * away))


def unshrink(sent: Sent, known: PublicMoments) -> Sent:
    """What the attacker makes of shrunk means: divides each by the factor that brings it nearest to the public one."""
    moments = sent.moments
    centre = moments.counts @ moments.means / moments.counts.sum()
    away = moments.means - centre
    usual = np.stack([known.means[label] for label in moments.labels]) - centre
    factors = np.square(away).sum(axis=1) / np.maximum((away * usual).sum(axis=1), 1e-12)
    means = centre + away / np.clip(factors, 0.05, 1)[:, None]
    return dataclasses.replace(sent, moments=dataclasses.replace(moments, means=means))


def release(pools: Pools, rows: Array, mu: float, generator: np.random.Generator) -> Sent:
    """A device's noisy sums; rows of the features have length 1."""
    sums = release_rounded(class_sums(pools.features[rows], pools.labels[rows], CLASSES), mu, generator)
    counts, size = np.maximum(sums.counts, 1), pools.features.shape[1]
    moments = Moments(
        labels=tuple(range(CLASSES)),
        counts=counts,
        means=sums.sums / counts[:, None],
        covariance=np.zeros((size, size)),
        df=0,
    )
    return Sent(rows, moments, np.zeros((0, size)), NoiseScale.of(mu).sums ** 2)


# --- the attack


class Attack:
    """Scores of attacked rows and their decoys, collected over devices and seeds."""

    def __init__(self) -> None:
        self.scored: dict[str, list[Scored]] = {"means": [], "plain": [], "directions": []}
        self.accuracies: list[float] = []
        self.share_sent: list[float] = []

    def add(self, pools: Pools, known: PublicMoments, sent: Sent, seed: int) -> None:
        """Asks for up to 300 rows. A class that was not sent gives all rows the same score."""
        asked = sent.rows[np.random.default_rng([seed, 2]).permutation(len(sent.rows))[:ATTACKED]]
        for label in np.unique(pools.labels[asked]).tolist():
            own = pools.features[asked[pools.labels[asked] == label]]
            others = pools.features[pools.decoys[pools.labels[pools.decoys] == label]]
            both = np.concatenate([own, others])
            for name, scores in self._scores(known, sent, label, both):
                self.scored[name] += [Scored(float(score), scores[len(own) :]) for score in scores[: len(own)]]

    def _scores(self, known: PublicMoments, sent: Sent, label: int, rows: Array) -> Iterator[tuple[str, Array]]:
        nothing, moments = np.zeros(len(rows)), sent.moments
        if label not in moments.labels:
            yield from ((name, nothing) for name in self.scored)
            return
        place = moments.labels.index(label)
        mean, count = moments.means[place], float(moments.counts[place])
        yield "means", known.leaning(rows, mean, label, count, sent.noise / count)
        pooled = known.pooled + sent.noise / count * np.eye(len(mean))
        yield "plain", (rows - known.means[label]) @ np.linalg.solve(pooled, mean - known.means[label])
        if len(sent.directions):
            basis = np.linalg.qr(sent.directions.T)[0].T
            yield "directions", known.nearness(rows, mean, basis, label)

    def row(self) -> str:
        """The cells of the table: linked by each score with intervals, and the accuracy."""
        results = {name: linkage(scored) if scored else None for name, scored in self.scored.items()}
        cells = [_cell(results["plain"]), _cell(results["means"], interval=True), _cell(results["directions"])]
        accuracy = (
            f"{100 * np.mean(self.accuracies):.1f} ± {100 * np.std(self.accuracies):.1f}" if self.accuracies else "–"
        )
        rows = len(self.scored["means"])
        return " | ".join([*cells, f"{rows}", accuracy])


def _cell(result: Linkage | None, interval: bool = False) -> str:
    if result is None:
        return "–"
    low, high = result.interval
    return f"{result.linked:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval else "")


def accuracy(moments: Moments | None, features: Array, labels: Array, shrinkage: float | None = None) -> float:
    """Of the closed form; chance without two classes."""
    if moments is None or len(moments.labels) < 2:
        return 1 / CLASSES
    space = make_space(moments, shrinkage_rule(moments.dimensions, moments.df) if shrinkage is None else shrinkage)
    return float((logits(space, coordinates(space, features), CLASSES).argmax(axis=1) == labels).mean())


def measure(name: str, seeds: Sequence[int]) -> dict[str, Attack]:
    """The rows of the table for a data set."""
    data = load_dataset(name)
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    features = Features(images, None).of(np.arange(len(labels)))
    result: dict[str, Attack] = {}
    for seed in seeds:
        for size in SUMS:
            pools = make_pools(features, labels, size * ROWS, seed)
            parts = [send(pools, rows) for rows in deal(pools, size, math.inf, seed)]
            _measure(result, f"sum of {size}", pools, [add(parts)] if size > 1 else parts, seed)
        pools = make_pools(features, labels, 5 * ROWS, seed)
        equal, uneven = deal(pools, 5, math.inf, seed), deal(pools, 5, 0.5, seed)
        sent = [send(pools, rows) for rows in equal]
        _measure(result, "equal", pools, sent, seed)
        for least in MIN_SAMPLES:
            what = f"alpha 0.5, min_samples {least}"
            _measure(result, what, pools, [send(pools, rows, least) for rows in uneven], seed)
        _measure_shrunk(result, pools, sent, seed)
        _measure_noise(result, pools, equal, seed)
    return result


def _measure(
    result: dict[str, Attack],
    what: str,
    pools: Pools,
    sent: Sequence[Sent],
    seed: int,
    known: PublicMoments | None = None,
) -> None:
    attack, known = result.setdefault(what, Attack()), known or pools.known()
    for part in sent:
        attack.add(pools, known, part, seed)
    present = [part.moments for part in sent if part.moments.labels]
    tested = pools.features[pools.tested], pools.labels[pools.tested]
    attack.accuracies.append(accuracy(merge(present) if present else None, *tested))


def _measure_shrunk(result: dict[str, Attack], pools: Pools, sent: Sequence[Sent], seed: int) -> None:
    known = pools.known()
    for factor in (*FACTORS, None):
        what = "shrunk, " + ("James-Stein" if factor is None else f"factor {factor}")
        shrunk = [shrink(part, factor) for part in sent]
        _measure(result, what, pools, shrunk, seed, known)
        undone = result.setdefault(f"{what}, undone", Attack())
        for part in shrunk:
            undone.add(pools, known, unshrink(part, known), seed)


def _measure_noise(result: dict[str, Attack], pools: Pools, dealt: Sequence[Array], seed: int) -> None:
    with np.load(CONSTANTS) as constants:
        directions, mean = (constants[f"{what}_28"].astype(np.float64) for what in ("directions", "mean"))
    units = on_grid(unit_rows((pools.features - mean) @ directions))
    private = dataclasses.replace(pools, features=units)
    known, scale = private.known(), math.sqrt(units.shape[1])
    for epsilon in EPSILONS:
        attack = result.setdefault(f"64 numbers, epsilon {epsilon:g}", Attack())
        mu, generator = mu_of(epsilon), np.random.default_rng([seed, 4])
        for rows in dealt:
            attack.add(private, known, release(private, rows, mu, generator), seed)
        merged = merged_moments(units, pools.labels, dealt, mu, seed)
        attack.accuracies.append(accuracy(merged, units[pools.tested] * scale, pools.labels[pools.tested], 0.0))


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion-mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    for name in given.datasets:
        result = measure(name, given.seeds)
        print(f"\n{name}, seeds {given.seeds}\n")
        print("| what the server sees | plain | means | directions | rows | accuracy |\n|---|---|---|---|---|---|")
        for what, attack in result.items():
            print(f"| {what} | {attack.row()} |", flush=True)


if __name__ == "__main__":
    main()
