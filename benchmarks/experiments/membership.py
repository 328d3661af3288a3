"""How many rows a curious server finds again in the one message of class statistics, by how many directions are sent.

    python benchmarks/experiments/membership.py mnist --image-size 8 --train-limit 1500
    python benchmarks/experiments/membership.py fashion-mnist --image-size 14 --train-limit 3000 --data-dir data

For each of the devices 60 of its rows, and for each of them 999 rows of its class that nobody trained on (of digits as
many as there are). The attacker has public rows of the same kind, knows the extractor, and knows the class of every
row that it asks about. `linked` is the share of rows that score above all their decoys, with a 95 % Wilson interval.
Scores, the larger the likelier that the row is the device's:

span        distance outside the span of the sent directions, relative to that outside the attacker's own (audit.md)
whitened    the same share of its length where the attacker's rows have unit covariance
mean        how far a row leans from the attacker's class mean towards the sent one, the optimal linear score
covariance  derivative of the likelihood in the covariance, at the attacker's
likelihood  of the row under the sent Gaussian, less that under the attacker's
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from one_exchange_fleet import Features
from torch import Tensor

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge, moments_of, to_wire
from fleetdistill_lab.simulation.data.datasets import load_dataset, stratified_rows
from fleetdistill_lab.simulation.data.partition import partition

ATTACKED, DECOYS, PUBLIC, TESTED = 60, 999, 5000, 2500
RANKS: dict[str, Callable[[int], int]] = {
    "128": lambda _: 128,
    "64": lambda _: 64,
    "32": lambda _: 32,
    "16": lambda _: 16,
    "df // 10": lambda df: min(128, df // 10),
    "df // 15": lambda df: min(128, df // 15),
    "df // 20": lambda df: min(128, df // 20),
    "0": lambda _: 0,
}
SCORES = ("span", "whitened", "mean", "covariance", "likelihood")
_SHRINKAGE = 0.05
_TOWARDS_PUBLIC = 0.1


@dataclass(frozen=True)
class Rows:
    """Features `[n, D]` and their labels `[n]`."""

    features: Array
    labels: Array

    def of(self, label: int) -> Array:
        return np.asarray(self.features[self.labels == label])


@dataclass(frozen=True)
class Pools:
    """Who has which rows: devices, nobody (decoys), the attacker, and the test part."""

    members: Rows
    decoys: Rows
    public: Rows
    tested: Rows


class Attacker:
    """What a server can make of public rows, and its scores of rows against what a device sent."""

    def __init__(self, public: Rows) -> None:
        self.known = moments_of(public.features, public.labels)
        values, vectors = np.linalg.eigh(self.known.covariance)
        self.axes = vectors[:, ::-1]
        covariance = self.known.covariance
        softer = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * np.diag(np.diag(covariance))
        values, vectors = np.linalg.eigh(softer)
        self.whitening, self.inverse = vectors / np.sqrt(values), (vectors / values) @ vectors.T

    def scores(self, sent: Moments, directions: Array, label: int, rows: Array) -> dict[str, Array]:
        """Of every score, `[n]`; 0 where the class was not sent or the score has nothing to go by."""
        nothing = np.zeros(len(rows))
        if label not in sent.labels:
            return dict.fromkeys(SCORES, nothing)
        mean, usual = sent.means[sent.labels.index(label)], self.known.means[self.known.labels.index(label)]
        away, beside = rows - mean, rows - usual
        return {
            "span": self._span(away, beside, mean - usual, directions),
            "whitened": self._whitened(away, directions),
            "mean": beside @ self.inverse @ (mean - usual),
            "covariance": self._covariance(away, sent.covariance),
            "likelihood": self._likelihood(away, beside, sent.covariance),
        }

    def _span(self, away: Array, beside: Array, step: Array, directions: Array) -> Array:
        if not len(directions):
            return np.asarray((beside / np.diag(self.known.covariance)) @ step)
        axes = self.axes[:, : len(directions)]
        return -_outside(away, np.linalg.qr(directions.T)[0]) / np.maximum(_outside(beside, axes), 1e-12)

    def _whitened(self, away: Array, directions: Array) -> Array:
        if not len(directions):
            return np.zeros(len(away))
        white = away @ self.whitening
        axes = np.linalg.qr((directions @ self.whitening).T)[0]
        return -_outside(white, axes) / np.square(white).sum(axis=1)

    def _covariance(self, away: Array, covariance: Array) -> Array:
        leaning = away @ self.inverse
        return np.asarray(((leaning @ (covariance - self.known.covariance)) * leaning).sum(axis=1))

    def _likelihood(self, away: Array, beside: Array, covariance: Array) -> Array:
        softer = (1 - _TOWARDS_PUBLIC) * covariance + _TOWARDS_PUBLIC * self.known.covariance
        sent = ((away @ np.linalg.inv(softer)) * away).sum(axis=1)
        return np.asarray(((beside @ self.inverse) * beside).sum(axis=1) - sent)


def _outside(rows: Array, axes: Array) -> Array:
    """Squared length outside the span of the orthonormal columns `axes`."""
    return np.asarray(np.square(rows).sum(axis=1) - np.square(rows @ axes).sum(axis=1))


# --- who has what


def make_pools(given: argparse.Namespace, seed: int) -> Pools:
    """Members as the simulation takes them; decoys and the attacker's rows from those that are left."""
    data = load_dataset(given.dataset, given.data_dir, image_size=given.image_size)
    images, labels, tested = data.train_images, data.train_labels.numpy(), None
    if given.dataset == "digits":  # small: what nobody trains on is decoys, the attacker's and the test part
        images = torch.cat([images, data.test_images])
        labels = np.concatenate([labels, data.test_labels.numpy()])
    features = _features(given, images)
    members = stratified_rows(labels, given.train_limit, seed)
    rest = np.random.default_rng([seed, 1]).permutation(np.setdiff1d(np.arange(len(labels)), members))
    most = DECOYS if given.dataset != "digits" else len(rest) // 15
    decoys = np.concatenate([rest[labels[rest] == label][:most] for label in np.unique(labels)])
    public = rest[~np.isin(rest, decoys)][:PUBLIC]
    if given.dataset != "digits":
        unseen = Features(data.test_images[:TESTED], given.dimensions)
        tested = Rows(unseen.of(np.arange(TESTED)), data.test_labels.numpy()[:TESTED])
    taken = [Rows(features.of(rows), labels[rows]) for rows in (members, decoys, public)]
    return Pools(*taken, tested or taken[1])


_CACHE: dict[str, Features] = {}


def _features(given: argparse.Namespace, images: Tensor) -> Features:
    return _CACHE.setdefault(f"{given.dataset}/{given.image_size}", Features(images, given.dimensions))


# --- the attack


@dataclass
class Tally:
    """Of the rows that were asked about: above all decoys, share of decoys below, above 99 % of them."""

    linked: list[bool]
    below: list[float]
    above_99: list[bool]

    def add(self, rows: Array, decoys: Array) -> None:
        for score in rows:
            below = float((decoys < score).mean())
            self.linked.append(below == 1)
            self.below.append(below + float((decoys == score).mean()) / 2)
            self.above_99.append(below >= 0.99)


def attack(given: argparse.Namespace) -> tuple[dict[tuple[str, str], Tally], dict[str, list[float]], int]:
    """(rank, score) -> tally over all seeds; rank -> accuracies of the closed form; fewest decoys of a class."""
    tallies = {(rank, score): Tally([], [], []) for rank in RANKS for score in SCORES}
    told: dict[str, list[float]] = {rank: [] for rank in RANKS}
    fewest = DECOYS
    for seed in given.seeds:
        pools = make_pools(given, seed)
        fewest = min(fewest, int(np.bincount(pools.decoys.labels).min()))
        attacker, labels = Attacker(pools.public), pools.members.labels
        dealt = partition("dirichlet_by_class", labels, given.devices, seed, alpha=given.alpha)
        parts = [Rows(pools.members.features[rows], labels[rows]) for rows in dealt.indices]
        for rank, cap in RANKS.items():
            sent = [_sent(part, cap, given.min_samples) for part in parts]
            told[rank].append(accuracy([moments for moments, _ in sent if moments.labels], pools.tested))
            for part, (moments, directions) in zip(parts, sent, strict=True):
                asked = np.random.default_rng(seed).permutation(len(part.labels))[:ATTACKED]
                for label in np.unique(part.labels[asked]).tolist():
                    rows = part.features[asked[part.labels[asked] == label]]
                    result = attacker.scores(moments, directions, label, rows)
                    others = attacker.scores(moments, directions, label, pools.decoys.of(label))
                    for score in SCORES:
                        tallies[rank, score].add(result[score], others[score])
    return tallies, told, fewest


def _sent(part: Rows, cap: Callable[[int], int], min_samples: int) -> tuple[Moments, Array]:
    """A device's moments and directions as the server has them."""
    moments = moments_of(part.features, part.labels, min_samples)
    sent = to_wire(moments, cap(moments.df))
    if sent.directions is None or sent.steps is None:
        return from_wire(sent), np.zeros((0, part.features.shape[1]))
    return from_wire(sent), sent.directions.astype(np.float64) * sent.steps.astype(np.float64)[:, None]


def accuracy(parts: list[Moments], tested: Rows) -> float:
    """Of the closed form."""
    merged = merge(parts)
    space = make_space(merged, shrinkage_rule(merged.dimensions, merged.df))
    result = logits(space, coordinates(space, tested.features), int(tested.labels.max()) + 1)
    return float((result.argmax(axis=1) == tested.labels).mean())


def wilson(hits: int, count: int, deviations: float = 1.96) -> tuple[float, float]:
    """The interval of a share."""
    share, more = hits / count, deviations**2 / count
    middle = (share + more / 2) / (1 + more)
    half = deviations / (1 + more) * math.sqrt(share * (1 - share) / count + more / (4 * count))
    return middle - half, middle + half


def print_table(given: argparse.Namespace) -> None:
    tallies, told, fewest = attack(given)
    rows = len(tallies["0", "span"].linked)
    print(
        f"\n{given.dataset}, {given.train_limit} rows, {given.devices} devices, alpha {given.alpha}, min_samples "
        f"{given.min_samples}, seeds {given.seeds}: {rows} rows among {fewest} decoys each or more"
    )
    others = " | ".join(f"linked, {score}" for score in SCORES[1:])
    print(f"| rank | linked | auc | tpr1 | {others} | accuracy |")
    print("|---" * (len(SCORES) + 4) + "|")
    for rank in RANKS:
        shares = [np.mean(tallies[rank, score].linked) for score in SCORES]
        span = tallies[rank, "span"]
        low, high = wilson(sum(span.linked), rows)
        cells = [f"{shares[0]:.3f} [{low:.3f}, {high:.3f}]", f"{np.mean(span.below):.3f}"]
        cells += [f"{np.mean(span.above_99):.3f}", *(f"{share:.3f}" for share in shares[1:])]
        print(f"| {rank} | {' | '.join(cells)} | {100 * np.mean(told[rank]):.1f} ± {100 * np.std(told[rank]):.1f} |")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["digits", "mnist", "fashion-mnist"])
    parser.add_argument("--image-size", type=int, help="pixels a side that images are averaged down to")
    parser.add_argument("--train-limit", type=int, default=1500, help="rows of all devices together")
    parser.add_argument("--devices", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--min-samples", type=int, default=5)
    parser.add_argument("--dimensions", type=int, help="D; by default 256 for small images, else 384")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", help="folder of the data sets; else FLEETDISTILL_DATA")
    print_table(parser.parse_args())


if __name__ == "__main__":
    main()
