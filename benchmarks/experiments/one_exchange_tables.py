"""The tables of one_exchange.py: every row beside one of them, in % over seeds, with paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Found = dict[tuple[int, str], dict[str, Any]]
"""(seed, row) -> figures."""
Cell = Callable[[dict[str, Any]], float]

_BASE = "closed form"


def _plain(row: str, label: str, on_all: str = "all", own: str = "own") -> tuple[str, str, Cell, Cell, str]:
    return label, row, lambda one: one[on_all], lambda one: one[own], "kb"


def _pair(row: str, label: str, name: str) -> tuple[str, str, Cell, Cell, str]:
    return label, row, lambda one: one[name][0], lambda one: one[name][1], "kb"


def _budget(name: str, label: str) -> tuple[str, str, Cell, Cell, str]:
    row = "fedavg at equal bytes"
    return label, row, lambda one: one[name]["global"], lambda one: one[name]["with_prior"], "kb"


LINES = [
    _plain("refined, R 5, h <= 1, stop", "refined head after five gradients, rank df // 15"),
    _plain("alone", "alone: own closed form, own prior"),
    _pair("fedavg", "FedAvg on the same features: devices", "devices"),
    _pair("fedavg", "the same, global", "global"),
    _pair("fedavg", "the same, global with the device's prior", "with_prior"),
    _pair("fedavg, raw features", "FedAvg on raw features: devices", "devices"),
    _pair("fedavg, raw features", "the same, global", "global"),
    _plain("means, nearest", "means only: nearest mean"),
    _plain("means, own covariance", "means only: own covariance"),
    _plain("means, own scatter", "means only: predictors on own scatter"),
    _plain("closed form", "closed form"),
    _plain("closed form", "closed form, own classes with the guard", "all", "guarded_own"),
    _plain("closed form", "closed form: personal on all, general on own", "personal_all", "general_own"),
    _plain("own predictor", "own predictor"),
    _plain("shrinkage by leave-one-out", "closed form, shrinkage by leave-one-out"),
    _plain("closed form, rank 32", "closed form, rank 32"),
    _plain("closed form, rank df // 15", "closed form, rank df // 15"),
    _plain("closed form, rank df // 20", "closed form, rank df // 20"),
    _plain("closed form, rank 0", "closed form, rank 0 (diagonal)"),
    _budget("linear", "FedAvg at equal bytes, linear"),
    _budget("network", "FedAvg at equal bytes, network, at least one round"),
]


def print_tables(title: str, found: Found, wanted: Sequence[int], base: str = _BASE) -> None:
    """One table of a setting, with differences to the row `base`; prints nothing where nothing was measured."""
    seeds = [seed for seed in wanted if {(seed, _BASE), (seed, base)} <= found.keys()]
    if not seeds:
        return
    print(f"\n{title}, seeds {', '.join(map(str, seeds))}: % ± deviation over seeds; differences to {base}")
    print(f"| | all classes | own classes | kB | all, less {base} | own, less {base} |")
    print("|---|---|---|---|---|---|")
    base_all, base_own = ({seed: found[seed, base][what] for seed in seeds} for what in ("all", "own"))
    for label, row, on_all, own, kb in LINES:
        have = [seed for seed in seeds if (seed, row) in found]
        if not have:
            continue
        ones = {seed: found[seed, row] for seed in have}
        cells = [
            spread([on_all(ones[seed]) for seed in have]),
            spread([own(ones[seed]) for seed in have]),
            f"{statistics.mean(one[kb] for one in ones.values()):,.0f}",
            paired([on_all(ones[seed]) - base_all[seed] for seed in have]),
            paired([own(ones[seed]) - base_own[seed] for seed in have]),
        ]
        print(f"| {label} | {' | '.join(cells)} |")
    _print_further(found, seeds)


def _print_further(found: Found, seeds: Sequence[int]) -> None:
    base = [found[seed, _BASE] for seed in seeds]
    print(
        f"leave-one-out says {spread([item['leave_one_out'] for item in base])} of the closed form; the guard kept own "
        f"statistics on {', '.join(str(item['kept_own']) for item in base)} devices; s "
        + ", ".join(f"{item['shrinkage']:.3g}" for item in base)
    )
    if chosen := [found[seed, row] for seed in seeds if (seed, row := "shrinkage by leave-one-out") in found]:
        print("s by leave-one-out: " + ", ".join(f"{item['shrinkage']:.3g}" for item in chosen))
    curves = [(found[seed, _BASE], found[seed, "fedavg"]) for seed in seeds if (seed, "fedavg") in found]
    for base_row, one in curves[:1]:
        print(f"FedAvg: {one['kb_round']:,.0f} kB a round, the exchange {base_row['kb']:,.0f} kB")
    reached = [_first(one["global_curve"], base_row["all"]) for base_row, one in curves]
    if reached:
        print(f"round in which FedAvg's global network is where the closed form is: {', '.join(reached)}")
    for name in ("linear", "network"):
        rounds = [
            found[seed, "fedavg at equal bytes"][name]["rounds"]
            for seed in seeds
            if (seed, "fedavg at equal bytes") in found
        ]
        if rounds:
            print(f"rounds of the {name} that fit into the bytes of one exchange: {', '.join(map(str, rounds))}")


def _first(curve: Sequence[float], level: float) -> str:
    return next((str(number) for number, value in enumerate(curve, start=1) if value >= level), "never")


def spread(values: Sequence[float]) -> str:
    """Mean ± deviation in %."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{deviation}"


def paired(differences: Sequence[float]) -> str:
    """Mean ± deviation in points, then each seed."""
    deviation = f" ± {100 * statistics.stdev(differences):.1f}" if len(differences) > 1 else ""
    each = ", ".join(f"{100 * difference:+.1f}" for difference in differences)
    return f"{100 * statistics.mean(differences):+.1f}{deviation} ({each})"
