"""One exchange of class statistics against every control, all on the same fixed features, paired by seed.

    python benchmarks/experiments/one_exchange.py digits
    python benchmarks/experiments/one_exchange.py fashion-14 --seeds 0 1 2 --data-dir data
    python benchmarks/experiments/one_exchange.py --dataset mnist --image-size 14 --train-limit 4000 --devices 20

Features are computed once. Every row of one (setting, seed) has the same rows on the same devices, so differences are
paired. Results are appended to a file as they come; what is there already is not computed again. `--table` prints the
tables and computes nothing. Bytes are those of
docs/reference/methods/classstats.md, without headers: float16 numbers, int8 directions; FedAvg's are its parameters in
float32, both ways in each round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_exchange_controls import (
    FedAvgSettings,
    at_equal_bytes,
    drawn_about,
    drawn_from,
    fedavg,
    predictors,
    with_prior,
)
from one_exchange_fleet import Fleet, Part, Setting, accuracies, known_sets, make_fleet, own_accuracy
from one_exchange_tables import print_tables

from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import (
    best_temperature,
    class_prior,
    coordinates,
    leave_one_out,
    logits,
    make_space,
    shrinkage_rule,
)
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge, moments_of, to_wire
from fleetdistill.seeds import derive_seed

MIN_SAMPLES = 5
RANK = 128
SHRINKAGES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Of which `leave-one-out` takes the one under which most rows are told."""
_COUNT_BYTES, _NUMBER_BYTES = 4, 2

Figures = dict[str, Any]
"""`all` and `own`: accuracies; `kb`: of a device, up and down; and what else is worth keeping."""

FASHION = Setting("fashion-mnist", train_limit=3000, test_limit=2500)
CIFAR = Setting("cifar10", train_limit=5000, test_limit=2500)
SETTINGS: dict[str, list[Setting]] = {
    "digits": [Setting(alpha=alpha) for alpha in (0.5, 0.1)],
    "fashion-14": [replace(FASHION, image_size=14, alpha=alpha) for alpha in (0.5, 0.1)],
    "fashion-28": [replace(FASHION, alpha=alpha) for alpha in (0.5, 0.1)],
    "mnist-28": [replace(FASHION, dataset="mnist", alpha=alpha) for alpha in (0.5, 0.1)],
    "mnist-20": [Setting("mnist", 14, 4000, 2500, devices=20, alpha=0.1)],
    "mnist-100": [Setting("mnist", 14, 8000, 2500, devices=100)],
    "femnist": [Setting("femnist-digits", devices=12, alpha=None)],
    "cifar10": [replace(CIFAR, alpha=alpha) for alpha in (0.5, 0.1)],
    "cifar10-25000": [replace(CIFAR, train_limit=25_000, alpha=alpha) for alpha in (0.5, 0.1)],
    "cifar100": [Setting("cifar100", alpha=alpha) for alpha in (0.5, 0.1)],
}


# --- the exchange


@dataclass(frozen=True)
class Exchange:
    """What the server has after the one message of each device.

    Attributes:
        parts: Moments of each device as the server has them; None of a device without a class of enough rows.
        merged: Of all of them.
        space: What the devices get.
        kb: Of a device, up and down, mean over devices.
    """

    parts: tuple[Moments | None, ...]
    merged: Moments
    space: ClassSpace
    kb: float

    def counted(self, device: int) -> tuple[int, ...]:
        part = self.parts[device]
        return part.labels if part else ()


def exchange(fleet: Fleet, cap: Callable[[int], int], shrinkage: float | None = None) -> Exchange:
    """The whole run: summaries up, the class space down.

    Args:
        fleet: The devices.
        cap: Degrees of freedom -> most directions that a device sends.
        shrinkage: s; None for the rule.
    """
    parts: list[Moments | None] = []
    sizes = []
    for part in fleet.parts:
        moments = moments_of(part.features, part.labels, MIN_SAMPLES)
        if not moments.labels:
            parts.append(None)
            sizes.append(0)
            continue
        sent = to_wire(moments, cap(moments.df))
        directions = 0 if sent.directions is None else len(sent.directions)
        parts.append(from_wire(sent))
        sizes.append(bytes_up(len(moments.labels), directions, fleet.dimensions))
    merged = merge(part for part in parts if part)
    share = shrinkage_rule(merged.dimensions, merged.df) if shrinkage is None else shrinkage
    space = as_sent(make_space(merged, share))
    down = bytes_down(len(merged.labels), fleet.dimensions)
    return Exchange(tuple(parts), merged, space, (float(np.mean(sizes)) + down) / 1e3)


def bytes_up(classes: int, directions: int, dimensions: int) -> int:
    """Counts and means, directions in int8 with a step each, the diagonal, degrees of freedom."""
    means = classes * (_NUMBER_BYTES * dimensions + _COUNT_BYTES)
    return means + directions * (dimensions + _NUMBER_BYTES) + _NUMBER_BYTES * dimensions + _COUNT_BYTES


def bytes_down(classes: int, dimensions: int) -> int:
    """Directions, origin, centres and counts of a class space."""
    across = classes - 1
    numbers = dimensions * across + across + classes * across
    return _NUMBER_BYTES * numbers + _COUNT_BYTES * classes + 24


def as_sent(space: ClassSpace) -> ClassSpace:
    """The space in float16."""
    halves = {name: getattr(space, name).astype(np.float16) for name in ("directions", "origin", "centres")}
    return replace(space, **halves)


def general(fleet: Fleet, space: ClassSpace) -> Array:
    """The closed form on the test part, the same on every device."""
    return logits(space, coordinates(space, fleet.test.features), fleet.classes)


def personal(fleet: Fleet, part: Part, space: ClassSpace, counted: Sequence[int]) -> tuple[Array, float, float]:
    """The closed form with the device's own class shares.

    Returns:
        Logits on the test part; the shares of own rows that leave-one-out tells without and with the device's shares.
    """
    prior = class_prior(part.labels, fleet.classes)
    left_out = leave_one_out(space, coordinates(space, part.features), part.labels, counted, fleet.classes)
    softer = best_temperature(left_out, part.labels, prior)
    plain = float((left_out.argmax(axis=1) == part.labels).mean())
    told = float(((left_out / softer + np.log(prior)).argmax(axis=1) == part.labels).mean())
    return general(fleet, space) / softer + np.log(prior), plain, told


# --- rows of the table


def closed_form(fleet: Fleet, cap: Callable[[int], int] | None = None, shrinkage: float | None = None) -> Figures:
    """General answer on all classes, personal answer on own ones, and with the guard."""
    made = exchange(fleet, cap or (lambda _: RANK), shrinkage)
    on_all, of_general = accuracies(fleet, [general(fleet, made.space)] * len(fleet.parts))
    answers, estimates, guarded, kept = [], [], [], 0
    for number, part in enumerate(fleet.parts):
        result, plain, told = personal(fleet, part, made.space, made.counted(number))
        answers.append(result)
        estimates.append(plain * len(part.labels))
        own, _, told_own = _alone(fleet, part)
        kept += told_own > told
        guarded.append(own if told_own > told else result)
    personal_all, own_classes = accuracies(fleet, answers)
    rows = sum(len(part.labels) for part in fleet.parts)
    return {
        "all": on_all,
        "own": own_classes,
        "kb": made.kb,
        "general_own": of_general,
        "personal_all": personal_all,
        "guarded_own": accuracies(fleet, guarded)[1],
        "kept_own": kept,
        "leave_one_out": sum(estimates) / rows,
        "shrinkage": float(made.space.shrinkage),
    }


def _alone(fleet: Fleet, part: Part) -> tuple[Array, float, float]:
    """`personal` from the device's own moments; where it has one class only, that class."""
    own = moments_of(part.features, part.labels)
    if len(own.labels) < 2 or own.df == 0:
        prior = np.log(class_prior(part.labels, fleet.classes))
        return np.tile(prior, (len(fleet.test.labels), 1)), 0.0, 1.0
    return personal(fleet, part, make_space(own, shrinkage_rule(own.dimensions, own.df)), own.labels)


def alone(fleet: Fleet) -> Figures:
    """Own closed form and own class shares."""
    answers = [_alone(fleet, part)[0] for part in fleet.parts]
    on_all, own = accuracies(fleet, answers)
    devices = [{"own": own_accuracy(fleet, part, one)} for part, one in zip(fleet.parts, answers, strict=True)]
    return {"all": on_all, "own": own, "kb": 0.0, "devices": devices}


def leave_one_out_shrinkage(fleet: Fleet) -> Figures:
    """The shrinkage under which most rows of all devices are told when each is left out; eight spaces go down."""
    told = {}
    for share in SHRINKAGES:
        made = exchange(fleet, lambda _: RANK, share)
        result = [
            personal(fleet, part, made.space, made.counted(number))[1] * len(part.labels)
            for number, part in enumerate(fleet.parts)
        ]
        told[share] = sum(result)
    best = max(SHRINKAGES, key=lambda share: (round(told[share]), share))
    figures = closed_form(fleet, shrinkage=best)
    further = (len(SHRINKAGES) - 1) * bytes_down(fleet.classes, fleet.dimensions) + 4 * len(SHRINKAGES)
    return {**figures, "kb": figures["kb"] + further / 1e3}


def own_predictor(fleet: Fleet) -> Figures:
    """Predictors of five sizes on own and drawn rows of the class space."""
    made = exchange(fleet, lambda _: RANK)
    inputs = [coordinates(made.space, part.features) for part in fleet.parts]
    drawn = drawn_about(made.space.centres.astype(np.float64), made.space.labels)
    result = predictors(fleet, inputs, coordinates(made.space, fleet.test.features), drawn)
    own = with_prior(fleet, result)
    return {"all": accuracies(fleet, result)[0], "own": accuracies(fleet, own)[1], "kb": made.kb}


def means_with_own_covariance(fleet: Fleet) -> Figures:
    """The fleet's means, and on each device the covariance of its own rows."""
    merged, kb = _means(fleet)
    plain, mixed = [], []
    for part in fleet.parts:
        own = moments_of(part.features, part.labels)
        share = shrinkage_rule(own.dimensions, own.df)
        space = make_space(replace(merged, covariance=own.covariance, df=max(own.df, 1)), share)
        plain.append(general(fleet, space))
        mixed.append(personal(fleet, part, space, ())[0])
    return {"all": accuracies(fleet, plain)[0], "own": accuracies(fleet, mixed)[1], "kb": kb}


def nearest_mean(fleet: Fleet) -> Figures:
    """The fleet's means and Euclidean distance."""
    merged, kb = _means(fleet)
    unit = float(np.mean([np.diag(moments_of(part.features, part.labels).covariance).mean() for part in fleet.parts]))
    space = make_space(replace(merged, covariance=unit * np.eye(merged.dimensions)), 0.0)
    mixed = [personal(fleet, part, space, ())[0] for part in fleet.parts]
    on_all = accuracies(fleet, [general(fleet, space)] * len(fleet.parts))[0]
    return {"all": on_all, "own": accuracies(fleet, mixed)[1], "kb": kb}


def means_and_own_rows(fleet: Fleet) -> Figures:
    """Predictors of five sizes on own rows and the fleet's means with the scatter of own rows about their means."""
    merged, kb = _means(fleet)
    centre, scale = _scale(merged, fleet)
    result = []
    for number, part in enumerate(fleet.parts):
        own = moments_of(part.features, part.labels)
        place = {label: at for at, label in enumerate(own.labels)}
        scatter = part.features - own.means[[place[int(label)] for label in part.labels]]
        pools = {label: merged.means[at] + scatter for at, label in enumerate(merged.labels)}
        drawn = drawn_from({label: (rows - centre) / scale for label, rows in pools.items()})
        only = replace(fleet, parts=(part,), seed=derive_seed(fleet.seed, "means", number))
        inputs, unseen = [(part.features - centre) / scale], (fleet.test.features - centre) / scale
        result += predictors(only, inputs, unseen, drawn, sizes_from=number)
    own_answers = with_prior(fleet, result)
    return {"all": accuracies(fleet, result)[0], "own": accuracies(fleet, own_answers)[1], "kb": kb}


def _means(fleet: Fleet) -> tuple[Moments, float]:
    parts = [moments_of(part.features, part.labels, MIN_SAMPLES) for part in fleet.parts]
    known = [replace(part, means=part.means.astype(np.float16).astype(np.float64)) for part in parts if part.labels]
    merged, width = merge(known), fleet.dimensions
    up = float(np.mean([len(part.labels) * (2 * width + 4) for part in parts]))
    return merged, (up + len(merged.labels) * (2 * width + 4)) / 1e3


def _scale(merged: Moments, fleet: Fleet) -> tuple[Array, Array]:
    spread = np.mean([part.features.std(axis=0) for part in fleet.parts], axis=0)
    return merged.means.mean(axis=0), spread + 1e-9


def fedavg_rows(fleet: Fleet, settings: FedAvgSettings | None = None) -> Figures:
    """FedAvg of a network on the same features: its last round, and every round's global accuracy."""
    settings = settings or FedAvgSettings()
    curves = fedavg(fleet, settings)
    return {
        "devices": curves.devices[-1],
        "global": curves.global_[-1],
        "with_prior": curves.with_prior[-1],
        "global_curve": [on_all for on_all, _ in curves.global_],
        "with_prior_curve": [own for _, own in curves.with_prior],
        "kb": settings.rounds * curves.bytes_a_round / 1e3,
        "kb_round": curves.bytes_a_round / 1e3,
    }


def fedavg_at_equal_bytes(fleet: Fleet) -> Figures:
    """FedAvg of a linear classifier and of the network, with the bytes of one exchange."""
    budget = exchange(fleet, lambda _: RANK).kb * 1e3
    figures: Figures = {"kb": budget / 1e3}
    for name, hidden in (("linear", ()), ("network", FedAvgSettings().hidden)):
        rounds, curves = at_equal_bytes(fleet, FedAvgSettings(hidden=hidden), budget)
        figures[name] = {
            "rounds": rounds,
            "global": curves.global_[-1][0],
            "with_prior": curves.with_prior[-1][1],
            "kb_round": curves.bytes_a_round / 1e3,
        }
    return figures


ROWS: dict[str, Callable[[Fleet], Figures]] = {
    "closed form": closed_form,
    "closed form, rank df // 15": lambda fleet: closed_form(fleet, lambda df: min(RANK, df // 15)),
    "closed form, rank df // 20": lambda fleet: closed_form(fleet, lambda df: min(RANK, df // 20)),
    "closed form, rank 32": lambda fleet: closed_form(fleet, lambda _: 32),
    "closed form, rank 0": lambda fleet: closed_form(fleet, lambda _: 0),
    "shrinkage by leave-one-out": leave_one_out_shrinkage,
    "alone": alone,
    "own predictor": own_predictor,
    "means, own covariance": means_with_own_covariance,
    "means, nearest": nearest_mean,
    "means, own scatter": means_and_own_rows,
    "fedavg": fedavg_rows,
    "fedavg, raw features": lambda fleet: fedavg_rows(fleet, FedAvgSettings(rate=0.02, scaled=False)),
    "fedavg at equal bytes": fedavg_at_equal_bytes,
}

SEARCH: list[dict[str, Any]] = [
    {},
    {"rate": 0.02},
    {"rate": 0.1},
    {"hidden": (64,)},
    {"hidden": (256,)},
    {"hidden": (128, 64)},
    {"hidden": (), "rate": 0.02},
    {"epochs": 1},
    {"epochs": 4},
    {"rounds": 60, "epochs": 1},
    {"weight_decay": 0.0},
    {"weight_decay": 5e-3},
    *({"scaled": False, "rate": rate} for rate in (0.002, 0.005, 0.01, 0.02, 0.05)),
]
"""What FedAvg's settings were chosen from."""


# --- measuring


def search(settings: Sequence[Setting], given: argparse.Namespace) -> None:
    """Prints what each of FedAvg's settings leads to; for seeds that no table uses."""
    for setting in settings:
        print(f"\n{setting.name}, seeds {given.seeds}: devices all, own; global; global with the prior all, own")
        for change in SEARCH:
            result = [
                fedavg_rows(make_fleet(setting, seed, given.data_dir), FedAvgSettings(**change)) for seed in given.seeds
            ]
            names = ("devices", "global", "with_prior")
            means = [100 * np.mean([item[name] for item in result], axis=0) for name in names]
            print(change, *(f"{value:.1f}" for pair in means for value in pair), flush=True)


def measure(settings: Sequence[Setting], given: argparse.Namespace) -> None:
    """Computes what is missing and appends it to the results."""
    known = read(given.results)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for setting in settings:
        for seed in given.seeds:
            missing = [row for row in given.rows if (setting.name, seed, row) not in known]
            if not missing:
                continue
            fleet = make_fleet(setting, seed, given.data_dir)
            for row in missing:
                start = time.perf_counter()
                figures = ROWS[row](fleet)
                seconds = round(time.perf_counter() - start, 2)
                kept = {"setting": setting.name, "seed": seed, "row": row, "seconds": seconds, **figures}
                with given.results.open("a") as file:
                    file.write(json.dumps(kept) + "\n")
                print(f"{setting.name}, seed {seed}, {row}: {seconds} s", flush=True)


def read(*results: Path) -> dict[tuple[str, int, str], Figures]:
    """(setting, seed, row) -> figures; of a row that was computed twice the later one."""
    lines = [json.loads(line) for file in results if file.exists() for line in file.read_text().splitlines()]
    return {(line["setting"], line["seed"], line["row"]): line for line in lines}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SETTINGS", help=f"of {', '.join(SETTINGS)}; or --dataset")
    parser.add_argument("--dataset", choices=known_sets(), help="a setting of your own")
    parser.add_argument("--image-size", type=int, help="pixels a side that images are averaged down to")
    parser.add_argument("--train-limit", type=int)
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--devices", type=int, default=5)
    parser.add_argument("--dimensions", type=int, help="D; by default 256 for small images, else 384")
    parser.add_argument("--alphas", type=float, nargs="*", default=[0.5, 0.1], help="none: by the set's clients")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--data-dir", help="folder of the data sets; else FLEETDISTILL_DATA")
    parser.add_argument("--results", type=Path, default=Path("out/experiments/one_exchange.jsonl"))
    parser.add_argument("--beside", type=Path, help="also print rows of refined_head.py's results")
    parser.add_argument("--less", default="closed form", metavar="ROW", help="the row that differences are to")
    parser.add_argument("--search", action="store_true", help="try FedAvg's settings and keep nothing")
    parser.add_argument("--table", action="store_true", help="print what is known and compute nothing")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[Setting]:
    """The settings by name, or the one that the options make for each alpha."""
    if given.dataset is None:
        return [setting for name in given.names for setting in SETTINGS[name]]
    size, limits = given.image_size, (given.train_limit, given.test_limit)
    alphas: list[float | None] = list(given.alphas) or [None]
    return [Setting(given.dataset, size, *limits, given.devices, alpha, given.dimensions) for alpha in alphas]


def main() -> None:
    torch.set_num_threads(1)
    given = parse()
    settings = chosen(given)
    if given.search:
        search(settings, given)
        return
    if not given.table:
        measure(settings, given)
    result = read(*filter(None, [given.beside, given.results]))
    for setting in settings:
        found = {key[1:]: one for key, one in result.items() if key[0] == setting.name}
        print_tables(setting.name, found, given.seeds, given.less)


if __name__ == "__main__":
    main()
