"""What hostile devices do to one merge of class statistics, with the server's tests and without.

    python benchmarks/experiments/hostile_devices.py digits --seeds 0 1 2
    python benchmarks/experiments/hostile_devices.py fashion-14 --data-dir data
    python benchmarks/experiments/hostile_devices.py kinds --data-dir data

Ten devices, of which the first one or two are hostile. Statistics, wire types, tests and merge are the product's; only
the messages are left out. Printed is the closed form's accuracy on all classes in %: with robust = off, gross and
strict, and gross with five trusted rows a class that are nobody's; and of how many honest devices of all fleets
something was left out, or the rows bounded. `kinds` are 4 devices with MNIST, 3 with USPS and 3 with FEMNIST.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from one_exchange import MIN_SAMPLES, RANK, SETTINGS
from one_exchange_fleet import Fleet, Part, Setting, make_fleet
from one_exchange_tables import spread

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, SharedStatistics
from fleetdistill.methods.classstats.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.shared_statistics import moments_of, to_wire
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import EvaluationSection
from fleetdistill_server.methods.classstats.merge import MergeRules, merge_moments

DEVICES = 10
LARGEST = 60_000.0  # in float16
KINDS = {"mnist": 4, "usps": 3, "femnist-digits": 3}
_KIND = Setting("mnist", 14, 1500, 1000, alpha=0.5)

Attack = Callable[[SharedStatistics, int, Mapping[int, Array]], SharedStatistics]
"""(what a device would send, classes, the honest devices' mean of each class) -> what it sends."""


# --- attacks


def flips(sent: SharedStatistics, classes: int, _: Mapping[int, Array]) -> SharedStatistics:
    return replace(sent, labels=[classes - 1 - label for label in sent.labels])


def longer(factor: float) -> Attack:
    """Means alone."""

    def attack(sent: SharedStatistics, _: int, __: Mapping[int, Array]) -> SharedStatistics:
        return replace(sent, means=_scaled(sent.means, factor))

    return attack


def thousandfold(sent: SharedStatistics, classes: int, means: Mapping[int, Array]) -> SharedStatistics:
    """Features times 1,000: means, and the covariance times a million."""
    return _wider(longer(1e3)(sent, classes, means), 1e6)


def declares(sent: SharedStatistics, classes: int, means: Mapping[int, Array]) -> SharedStatistics:
    """10^9 rows in all, with flipped labels."""
    flipped = flips(sent, classes, means)
    counts = np.full_like(flipped.counts, 10**9 // len(flipped.labels))
    return replace(flipped, counts=counts, df=np.array(counts.sum() - len(counts), np.int32))


def swaps(sent: SharedStatistics, _: int, __: Mapping[int, Array]) -> SharedStatistics:
    """The means of its two largest classes change places."""
    if len(sent.labels) < 2:
        return sent
    first, second = np.argsort(-sent.counts)[:2]
    means = sent.means.copy()
    means[[first, second]] = means[[second, first]]
    return replace(sent, means=means)


def widens(sent: SharedStatistics, _: int, __: Mapping[int, Array]) -> SharedStatistics:
    return _wider(sent, 50.0)


def claims(sent: SharedStatistics, _: int, means: Mapping[int, Array]) -> SharedStatistics:
    """All classes, each with the next one's mean, from as many rows as it has."""
    labels = sorted(means)
    each = max(int(sent.counts.sum()) // len(labels), MIN_SAMPLES)
    rolled = np.roll(np.stack([means[label] for label in labels]), -1, axis=0).astype(sent.means.dtype)
    counts = np.full(len(labels), each, np.int32)
    df = np.array(counts.sum() - len(counts), np.int32)
    return replace(sent, labels=labels, counts=counts, means=rolled, df=df)


def _scaled(array: Array, factor: float) -> Array:
    return np.asarray(np.clip(factor * array.astype(np.float64), -LARGEST, LARGEST).astype(array.dtype))


def _wider(sent: SharedStatistics, factor: float) -> SharedStatistics:
    changed = {"variances": _scaled(sent.variances, factor)}
    if sent.steps is not None:
        changed["steps"] = _scaled(sent.steps, factor**0.5)
    return replace(sent, **changed)


ATTACKS: dict[str, tuple[int, Attack | None]] = {
    "no attacker": (0, None),
    "1 flips labels": (1, flips),
    "2 flip labels": (2, flips),
    "1 sends means x 1,000": (1, longer(1e3)),
    "2 send means x 1,000": (2, longer(1e3)),
    "2 send means x 5": (2, longer(5.0)),
    "1 sends features x 1,000": (1, thousandfold),
    "2 send features x 1,000": (2, thousandfold),
    "1 declares 10^9 rows and flips": (1, declares),
    "2 declare 10^9 rows and flip": (2, declares),
    "2 swap their two largest classes": (2, swaps),
    "2 send covariance x 50": (2, widens),
    "2 claim all classes, each with the next one's mean": (2, claims),
}


# --- the merge


class Notes:
    """Counts the devices that something was left out of, or bounded."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self.bounded: set[str] = set()

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        if kind == "summary-left-out":
            self.left_out.add(device)
        if kind == "rows-capped":
            self.bounded.add(device)

    def guard(self, name: str, text: str, device: str = "") -> None: ...

    def report(self, name: str, value: Any) -> None: ...

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator()


def statistics_of(part: Part) -> SharedStatistics:
    result = to_wire(moments_of(part.features, part.labels, MIN_SAMPLES), RANK, ClassStatsConfig().rows_per_direction)
    sent = decode(encode({"statistics": result}))["statistics"]
    assert isinstance(sent, SharedStatistics)
    return sent


def closed_form(fleet: Fleet, parts: Mapping[str, SharedStatistics], rules: MergeRules, notes: Notes) -> float:
    """Of the general answer; chance where nothing can be made of the parts."""
    moments, *_ = merge_moments(parts, rules, notes)
    if moments is None:
        return 1 / fleet.classes
    try:
        space = make_space(moments, shrinkage_rule(moments.dimensions, moments.df))
    except KnowledgeError:
        return 1 / fleet.classes
    result = logits(space, coordinates(space, fleet.test.features), fleet.classes)
    return _share_right(fleet, result)


def _share_right(fleet: Fleet, found: Array) -> float:
    return float((found.argmax(axis=1) == fleet.test.labels).mean())


# --- measuring


@dataclass(frozen=True)
class Case:
    """One fleet, and rows that are nobody's and not in its test part."""

    fleet: Fleet
    trusted: Mapping[int, Array]


def cases(name: str, given: argparse.Namespace) -> Iterator[tuple[str, list[Case]]]:
    if name == "kinds":
        yield "4 MNIST, 3 USPS, 3 FEMNIST devices, alpha 0.5", [_of_kinds(seed, given) for seed in given.seeds]
        return
    for setting in SETTINGS[name]:
        ten = replace(setting, devices=DEVICES)
        yield ten.name, [_held_apart(make_fleet(ten, seed, given.data_dir)) for seed in given.seeds]


def _of_kinds(seed: int, given: argparse.Namespace) -> Case:
    fleets = []
    for name, devices in KINDS.items():
        limit = 375 * devices
        setting = replace(_KIND, dataset=name, devices=devices, train_limit=limit)
        fleets.append(make_fleet(setting, seed, given.data_dir))
    parts = tuple(part for fleet in fleets for part in fleet.parts)
    held = [_held_apart(fleet) for fleet in fleets]
    images, features, labels = (
        [getattr(item.fleet.test, field) for item in held] for field in ("images", "features", "labels")
    )
    test = Part(torch.cat(images), np.concatenate(features), np.concatenate(labels))
    return Case(Fleet(parts, test, fleets[0].classes, seed), held[0].trusted)


def _held_apart(fleet: Fleet) -> Case:
    """The first rows of each class of the test part are the operator's, and no test."""
    test, trusted, taken = fleet.test, {}, list[int]()
    for label in range(fleet.classes):
        at = np.flatnonzero(test.labels == label)[: EvaluationSection().trusted_rows]
        trusted[label] = test.features[at].mean(axis=0)
        taken += at.tolist()
    left = np.setdiff1d(np.arange(len(test.labels)), taken)
    kept = Part(test.images[torch.from_numpy(left)], test.features[left], test.labels[left])
    return Case(replace(fleet, test=kept), trusted)


def rules_of(case: Case) -> dict[str, MergeRules]:
    plain = {name: MergeRules(robust=name) for name in ("off", "gross", "strict")}
    return {**plain, "trusted": MergeRules(robust="gross", trusted=case.trusted)}


def means_of(parts: Sequence[SharedStatistics]) -> dict[int, Array]:
    """The mean over the devices of each class's mean."""
    result: dict[int, list[Array]] = {}
    for part in parts:
        for label, mean in zip(part.labels, part.means if part.labels else (), strict=True):
            result.setdefault(label, []).append(mean.astype(np.float64))
    return {label: np.mean(means, axis=0) for label, means in sorted(result.items())}


def print_table(title: str, of: Sequence[Case]) -> None:
    print(f"\n{title}, {len(of)} fleets")
    print("| | off | gross | strict | gross, trusted rows | honest left out: gross, strict, trusted | bounded |")
    print("|---|---|---|---|---|---|---|", flush=True)
    honest = [[statistics_of(part) for part in case.fleet.parts] for case in of]
    for name, (count, attack) in ATTACKS.items():
        result: dict[str, list[float]] = {}
        left_out: dict[str, int] = {}
        bounded = 0
        for case, sent in zip(of, honest, strict=True):
            means = means_of(sent)
            lies = [attack(item, case.fleet.classes, means) for item in sent[:count] if attack and item.labels]
            parts = {f"{number}": one for number, one in enumerate([*lies, *sent[len(lies) :]])}
            liars = {f"{number}" for number in range(len(lies))}
            for rule, rules in rules_of(case).items():
                notes = Notes()
                result.setdefault(rule, []).append(closed_form(case.fleet, parts, rules, notes))
                left_out[rule] = left_out.get(rule, 0) + len(notes.left_out - liars)
                bounded += len(notes.bounded - liars) if rule == "gross" else 0
        cells = [*(spread(figures) for figures in result.values()), *(f"{left_out[rule]}" for rule in result)]
        honest_out = ", ".join(cells[5:])
        print(f"| {name} | {' | '.join(cells[:4])} | {honest_out} | {bounded} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*SETTINGS, "kinds"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", help="folder of the data sets; else FLEETDISTILL_DATA")
    given = parser.parse_args()
    for name, of in cases(given.name, given):
        print_table(name, of)


if __name__ == "__main__":
    main()
