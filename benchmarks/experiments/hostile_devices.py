"""What hostile devices do to one exchange of class statistics, with and without tests on what was sent.

    python benchmarks/experiments/hostile_devices.py digits --seeds 0 1 2
    python benchmarks/experiments/hostile_devices.py fashion-14 --data-dir data

Offline: summaries, tests and merge, no messages. Ten devices, of which the first one or two are hostile. The tests are
those of robust.md, section 5, on the shared sums: a cap on declared rows, `spread` by the trace of the device's one
covariance, and `nearest centre`; strict adds the distance of each mean. Printed is the accuracy of the general answer
on all classes in %, and how many honest devices were left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from one_exchange import MIN_SAMPLES, RANK, SETTINGS
from one_exchange_fleet import Fleet, Part, make_fleet
from one_exchange_tables import spread

from fleetdistill.class_space import coordinates, logits, make_space, shrinkage_rule
from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array
from fleetdistill.shared_statistics import Moments, from_wire, merge, moments_of, to_wire

DEVICES = 10
MOST_ROWS, MOST_SPREAD = 3.0, 4.0
LEAST = {"gross": 0.25, "strict": 0.5}
MOST_DISTANCE, LEAST_DISTANCE, FEW_ROWS = 3.0, 3.0, 0.05
FROM_THREE = 3

Attack = Callable[[Part, Moments, int, Moments], Moments]
"""(a device's rows, what it would send, classes, moments of all honest devices) -> what it sends."""


def honest(part: Part, rank: int = RANK) -> Moments:
    """What a device sends, as the server has it."""
    return from_wire(to_wire(moments_of(part.features, part.labels, MIN_SAMPLES), rank))


def flips(part: Part, _: Moments, classes: int, __: Moments) -> Moments:
    return honest(replace(part, labels=classes - 1 - part.labels))


def thousandfold(_: Part, sent: Moments, __: int, ___: Moments) -> Moments:
    return replace(sent, means=1e3 * sent.means, covariance=1e6 * sent.covariance)


def declares(part: Part, sent: Moments, classes: int, others: Moments) -> Moments:
    """10^9 rows of each class, with flipped labels."""
    flipped = flips(part, sent, classes, others)
    return replace(flipped, counts=np.full_like(flipped.counts, 10**9), df=10**9 * len(flipped.labels))


def swaps(_: Part, sent: Moments, __: int, ___: Moments) -> Moments:
    """The means of its two largest classes change places."""
    if len(sent.labels) < 2:
        return sent
    first, second = np.argsort(-sent.counts)[:2]
    means = sent.means.copy()
    means[[first, second]] = means[[second, first]]
    return replace(sent, means=means)


def widens(_: Part, sent: Moments, __: int, ___: Moments) -> Moments:
    return replace(sent, covariance=50 * sent.covariance)


def claims(_: Part, sent: Moments, __: int, others: Moments) -> Moments:
    """All classes, each with the next one's mean."""
    each = max(int(sent.counts.sum()) // len(others.labels), MIN_SAMPLES)
    counts = np.full(len(others.labels), each, dtype=np.int64)
    return replace(sent, labels=others.labels, counts=counts, means=np.roll(others.means, -1, axis=0))


ATTACKS: dict[str, tuple[int, Attack | None]] = {
    "no attacker": (0, None),
    "1 flips labels": (1, flips),
    "2 flip labels": (2, flips),
    "1 sends features x 1,000": (1, thousandfold),
    "2 send features x 1,000": (2, thousandfold),
    "1 declares 10^9 rows and flips": (1, declares),
    "2 declare 10^9 rows and flip": (2, declares),
    "2 swap their two largest classes": (2, swaps),
    "2 send covariance x 50": (2, widens),
    "2 claim all classes, each with the next one's mean": (2, claims),
}


# --- the tests


@dataclass(frozen=True)
class Verdict:
    """Devices that count, with their weights in their counts, and the numbers of those left out."""

    kept: list[Moments]
    left_out: list[int]


def tested(parts: Sequence[Moments], strictness: str) -> Verdict:
    """What the merge takes; `off` takes everything as it is declared."""
    if strictness == "off":
        return Verdict([part for part in parts if part.labels], [])
    known = {number: part for number, part in enumerate(parts) if part.labels}
    usual = median(int(part.counts.sum()) for part in known.values())
    known = {number: _capped(part, MOST_ROWS * usual) for number, part in known.items()}
    wide = median(float(np.trace(part.covariance)) for part in known.values())
    known = {k: part for k, part in known.items() if np.trace(part.covariance) <= MOST_SPREAD * wide}
    known = _near_their_centres(known, LEAST[strictness], len(parts) // 2)
    if strictness == "strict":
        known = _not_far_off(known, wide)
    return Verdict(list(known.values()), [number for number in range(len(parts)) if number not in known])


def _capped(part: Moments, most: float) -> Moments:
    share = min(1.0, most / float(part.counts.sum()))
    counts = np.maximum(np.round(share * part.counts), 1).astype(np.int64)
    return replace(part, counts=counts, df=max(round(share * part.df), 1))


def _near_their_centres(known: dict[int, Moments], least: float, most_left_out: int) -> dict[int, Moments]:
    known = dict(known)
    for _ in range(most_left_out):
        shares = {number: share for number in known if (share := _share_near(known, number)) is not None}
        worst = min(shares, key=lambda number: shares[number], default=None)
        if worst is None or shares[worst] >= least:
            break
        del known[worst]
    return known


def _share_near(known: dict[int, Moments], number: int) -> float | None:
    """Share of a device's classes whose mean is nearest to the others' centre of that class; None if too few."""
    means: dict[int, list[Array]] = {}
    for other, part in known.items():
        if other != number:
            for label, mean in zip(part.labels, part.means, strict=True):
                means.setdefault(label, []).append(mean)
    centres = {label: np.median(found, axis=0) for label, found in means.items()}
    mine = [(label, mean) for label, mean in zip(known[number].labels, known[number].means, strict=True)]
    shared = [(label, mean) for label, mean in mine if label in centres]
    if len(shared) < 2:
        return None
    labels, stacked = list(centres), np.stack(list(centres.values()))
    nearest = [labels[int(np.square(stacked - mean).sum(axis=1).argmin())] for _, mean in shared]
    return float(np.mean([found == label for found, (label, _) in zip(nearest, shared, strict=True)]))


def _not_far_off(known: dict[int, Moments], wide: float) -> dict[int, Moments]:
    """Takes from each device the classes whose mean is far from all others'."""
    drop: dict[int, set[int]] = {number: set() for number in known}
    for label in sorted({label for part in known.values() for label in part.labels}):
        holders = [number for number, part in known.items() if label in part.labels]
        if len(holders) < FROM_THREE:
            continue
        rows = {number: _of_class(known[number], label) for number in holders}
        middle = np.median([mean for mean, _ in rows.values()], axis=0)
        far = {
            k: float(np.linalg.norm(mean - middle) / np.sqrt(wide * (1 / n + FEW_ROWS)))
            for k, (mean, n) in rows.items()
        }
        most = max(MOST_DISTANCE * median(far.values()), LEAST_DISTANCE)
        for number, distance in far.items():
            if distance > most:
                drop[number].add(label)
    left = {number: _without(part, drop[number]) for number, part in known.items()}
    return {number: part for number, part in left.items() if part.labels}


def _of_class(part: Moments, label: int) -> tuple[Array, int]:
    at = part.labels.index(label)
    return part.means[at], int(part.counts[at])


def _without(part: Moments, labels: set[int]) -> Moments:
    keep = [at for at, label in enumerate(part.labels) if label not in labels]
    kept = tuple(part.labels[at] for at in keep)
    return replace(part, labels=kept, counts=part.counts[keep], means=part.means[keep])


# --- measuring


def accuracy(fleet: Fleet, parts: Sequence[Moments]) -> float:
    """Of the general answer; chance where nothing can be made of the parts."""
    try:
        merged = merge(parts)
        space = make_space(merged, shrinkage_rule(merged.dimensions, merged.df))
    except KnowledgeError:
        return 1 / fleet.classes
    found = logits(space, coordinates(space, fleet.test.features), fleet.classes)
    return float((found.argmax(axis=1) == fleet.test.labels).mean())


def print_table(name: str, given: argparse.Namespace) -> None:
    for setting in SETTINGS[name]:
        found: dict[tuple[str, str], list[float]] = {}
        honest_left_out: dict[tuple[str, str], int] = {}
        for seed in given.seeds:
            fleet = make_fleet(replace(setting, devices=DEVICES), seed, given.data_dir)
            sent = [honest(part) for part in fleet.parts]
            everybody = merge([part for part in sent if part.labels])
            for attack, (count, make) in ATTACKS.items():
                hostile = [make(fleet.parts[k], sent[k], fleet.classes, everybody) for k in range(count) if make]
                parts = hostile + sent[count:]
                for strictness in ("off", *LEAST):
                    verdict = tested(parts, strictness)
                    key = attack, strictness
                    found.setdefault(key, []).append(accuracy(fleet, verdict.kept))
                    wrongly = sum(number >= count for number in verdict.left_out if parts[number].labels)
                    honest_left_out[key] = honest_left_out.get(key, 0) + wrongly
        print(f"\n{replace(setting, devices=DEVICES).name}, seeds {', '.join(map(str, given.seeds))}")
        print("| | no tests | gross | strict | honest devices left out: gross | strict |")
        print("|---|---|---|---|---|---|")
        for attack in ATTACKS:
            cells = [spread(found[attack, strictness]) for strictness in ("off", *LEAST)]
            print(
                f"| {attack} | {' | '.join(cells)} | "
                + " | ".join(str(honest_left_out[attack, s]) for s in LEAST)
                + " |"
            )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", help="folder of the data sets; else FLEETDISTILL_DATA")
    given = parser.parse_args()
    print_table(given.name, given)


if __name__ == "__main__":
    main()
