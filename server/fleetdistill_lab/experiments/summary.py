"""Means, spreads and paired differences over seeds, and the orders that a source claims."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fleetdistill_lab.experiments.definition import Claim
from fleetdistill_lab.experiments.metrics import METRICS
from fleetdistill_lab.experiments.results import ModelRow
from fleetdistill_server.texts import counted

__all__ = [
    "EqualBytes",
    "Line",
    "Pair",
    "Runs",
    "Summary",
    "Values",
    "at_equal_bytes",
    "check_claims",
    "comparisons",
    "holm",
    "lines_of",
    "paired_p",
    "significant_ratio",
    "summarize",
]

Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""A metric by grid point, label and seed."""
Runs = Mapping[tuple[str, str, int], str]
"""Names of runs by grid point, label and seed; a control without a grid's setting has one run at several points."""
_NO_RUNS: Runs = MappingProxyType({})
_OF_ALL = ("global", "general")
"""Names of the models that are the same on all devices."""
_HEADERS = 1e-3
"""Part of a payload below which bytes differ by their headers only, such as the digits of a round's number."""
LEVEL = 0.05
"""Largest p value of a difference that counts as one."""


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the mean, and the standard deviation with n - 1; None for too few values."""
    mean = statistics.mean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def paired_p(differences: Sequence[float]) -> float | None:
    """Returns the two-sided p value of a paired t test; None for fewer than two pairs or equal differences."""
    if len(differences) < 2:
        return None
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    if spread <= 1e-9 * abs(mean):  # equal but for rounding
        return None
    from scipy import stats

    t = mean / (spread / len(differences) ** 0.5)
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def holm(p_values: Sequence[float | None], tests: Sequence[Hashable] | None = None) -> list[float | None]:
    """Adjusts p values for their number by Holm's method; None stays None and does not count.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 1979.

    Args:
        p_values: The p values.
        tests: What each one compares; those that compare the same count once. By default all differ.
    """
    tests = range(len(p_values)) if tests is None else tests
    p_of = {test: p for test, p in zip(tests, p_values, strict=True) if p is not None}
    adjusted: dict[Hashable, float] = {}
    largest = 0.0
    for rank, test in enumerate(sorted(p_of, key=p_of.__getitem__)):
        largest = max(largest, min(1.0, (len(p_of) - rank) * p_of[test]))
        adjusted[test] = largest
    return [adjusted.get(test) for test in tests]


def _runs_by_key(runs: Runs) -> dict[tuple[str, str], tuple[str, ...]]:
    """Returns the runs of all seeds by grid point and label."""
    result: dict[tuple[str, str], tuple[str, ...]] = {}
    for (point, label, _), run in runs.items():
        result[point, label] = (*result.get((point, label), ()), run)
    return result


def comparisons(runs: Runs, reference: str) -> int:
    """Returns how many comparisons with the reference have different runs; a pair of the same runs counts once."""
    of = _runs_by_key(runs)
    pairs = {(found, of.get((point, reference))) for (point, _), found in of.items()}
    return sum(found != other for found, other in pairs)


@dataclass(frozen=True)
class Line:
    """One model over all seeds; accuracies are in [0, 1].

    Attributes:
        method: Label of the method.
        name: The label, with the model's name if the method has several models.
        seeds: Number of seeds that have it.
        wanted: Number of seeds that are to have it.
        accuracy, accuracy_spread: Mean accuracy on all classes, and its standard deviation over seeds; None if it was
            not scored, or with a single seed.
        own_accuracy, own_accuracy_spread: The same of `ComparisonRow.own_accuracy`.
        bytes: Mean bytes from and to a device in the whole run.
        exchanges: Mean number of a device's exchanges.
        devices: Number of devices that a seed's means are over; the smallest one of the seeds.
        untrained: Number of these that never took part; the largest one of the seeds.
        base: Name of the reference's line from which the difference is, as in `lines_of`. Empty for its own lines.
        difference, difference_spread: Mean and standard deviation of the paired difference in accuracy from the base;
            None without a base, and if one of the two lacks a seed.
        p: Two-sided p value of a paired t test of the difference, by Holm's method for the number of lines; None if
            there are fewer than two pairs, or all differences are equal.
        own_difference, own_difference_spread, own_p: The same of `own_accuracy`.
    """

    method: str
    name: str
    seeds: int
    wanted: int
    accuracy: float | None
    accuracy_spread: float | None
    own_accuracy: float | None
    own_accuracy_spread: float | None
    bytes: float
    exchanges: float
    devices: int
    untrained: int
    base: str = ""
    difference: float | None = None
    difference_spread: float | None = None
    p: float | None = None
    own_difference: float | None = None
    own_difference_spread: float | None = None
    own_p: float | None = None


def lines_of(rows: Sequence[ModelRow], reference: str = "", wanted: int | None = None) -> list[Line]:
    """Returns a line for each model, in order of appearance, the models of the reference first.

    Differences are from the reference's model of the same name; without one, from that of the same kind, since a global
    model is for all classes and a device's for its own; else from its first model.

    Args:
        rows: The models of all runs.
        reference: Label of a method; by default the first one.
        wanted: Number of seeds of the experiment; by default that of the rows.
    """
    wanted = len({row.seed for row in rows}) if wanted is None else wanted
    keys = list(dict.fromkeys((row.label, row.model) for row in rows))
    keys.sort(key=lambda key: key[0] != reference)
    by_key = {key: {row.seed: row for row in rows if (row.label, row.model) == key} for key in keys}
    whole = {key for key, of in by_key.items() if len(of) >= wanted}
    own = [model for label, model in keys if label == keys[0][0]]
    bases = {key: (keys[0][0], _base(key[1], own)) for key in keys if key[0] != keys[0][0]}
    pairs = {key: base for key, base in bases.items() if {key, base} <= whole}
    rates, own_rates = _compare(by_key, pairs, ""), _compare(by_key, pairs, "own_")
    models = {label: sum(other == label for other, _ in keys) for label, _ in keys}
    names = {(label, model): f"{label} {model}" if models[label] > 1 else label for label, model in keys}
    result = []
    for key in keys:
        of = list(by_key[key].values())
        result.append(
            Line(
                method=key[0],
                name=names[key],
                seeds=len(of),
                wanted=wanted,
                bytes=statistics.mean(row.bytes for row in of),
                exchanges=statistics.mean(row.exchanges for row in of),
                devices=min(row.devices for row in of),
                untrained=max(row.untrained for row in of),
                base=names[bases[key]] if key in bases else "",
                **rates[key],
                **own_rates[key],
            )
        )
    return result


_Key = tuple[str, str]
"""Label of a method and name of a model."""


def _compare(
    by_key: Mapping[_Key, Mapping[int, ModelRow]], bases: Mapping[_Key, _Key], prefix: str
) -> dict[_Key, dict[str, Any]]:
    """Returns the fields of `Line` about an accuracy; a prefix says which one, and begins their names."""
    name = f"{prefix}accuracy"
    values = {
        key: {seed: rate for seed, row in of.items() if (rate := getattr(row, name)) is not None}
        for key, of in by_key.items()
    }
    differences = {key: paired(values[key], values[bases[key]]) if key in bases else [] for key in values}
    result: dict[_Key, dict[str, Any]] = {}
    for key, p in zip(values, holm(list(map(paired_p, differences.values()))), strict=True):
        mean, spread = mean_and_spread(list(values[key].values()))
        difference, difference_spread = mean_and_spread(differences[key])
        found = {"accuracy": mean, "accuracy_spread": spread, "difference": difference, "p": p}
        found["difference_spread"] = difference_spread
        result[key] = {f"{prefix}{name}": value for name, value in found.items()}
    return result


def _base(model: str, models: Sequence[str]) -> str:
    """Returns from which of the reference's models a model's difference is."""
    if model in models:
        return model
    return next((other for other in models if (other in _OF_ALL) == (model in _OF_ALL)), models[0])


def paired(values: Mapping[int, float], others: Mapping[int, float], unit: str = "") -> list[float]:
    """Returns the differences of the seeds that are in both, in the order of `values`; see `difference`."""
    return [difference(value, others[seed], unit) for seed, value in values.items() if seed in others]


def difference(value: float, other: float, unit: str) -> float:
    """Returns the difference; bytes that differ by less than 0.1 % are equal but for headers, and have none."""
    is_equal = unit == "bytes" and abs(value - other) < _HEADERS * max(value, other)
    return 0.0 if is_equal else value - other


@dataclass(frozen=True)
class Summary:
    """A method's metric at one grid point, over seeds.

    Attributes:
        label: Label of the method.
        point: The grid point.
        seeds: Number of seeds that have the figure.
        missing: Number of finished seeds without the figure, such as runs that did not reach the target.
        failed: Number of seeds whose run failed.
        wanted: Number of seeds of the experiment.
        mean, spread: Mean and standard deviation; None without a seed, or with one.
        difference, difference_spread: The same of the paired difference from the reference; None for the reference.
        p: Two-sided p value of a paired t test of the difference, by Holm's method for all methods and grid points of
            the table. Grid points that share the runs of both methods count once. None for bytes, which hardly vary
            between seeds, so that any difference would be significant.
        partition: Kind of the partition; empty without a run.
    """

    label: str
    point: str
    seeds: int
    missing: int
    failed: int
    wanted: int
    mean: float | None
    spread: float | None
    difference: float | None
    difference_spread: float | None
    p: float | None
    partition: str = ""


def summarize(
    values: Values,
    reference: str,
    finished: Mapping[tuple[str, str], int],
    wanted: int,
    failed: Mapping[tuple[str, str], int] = MappingProxyType({}),
    runs: Runs = _NO_RUNS,
    unit: str = "",
) -> list[Summary]:
    """Returns the summaries of one metric, points outermost.

    A mean is over all finished seeds or does not exist: where a seed has no figure, such as a target that it did not
    reach, the mean of the others would be too good. A difference is over all seeds or does not exist.

    Args:
        values: The metric.
        reference: Label from which differences are.
        finished: Number of finished runs by point and label.
        wanted: Number of seeds of the experiment.
        failed: Number of failed runs by point and label.
        runs: Names of the runs; by default every cell has a run of its own.
        unit: Unit of the metric.
    """
    keys = [(point, label) for point, of in values.items() for label in of]
    lacks = {key: finished.get(key, 0) - len(values[key[0]][key[1]]) for key in keys}
    whole = {key for key in keys if len(values[key[0]][key[1]]) >= wanted}
    differences = {
        (point, label): paired(values[point][label], values[point][reference], unit)
        if label != reference and {(point, label), (point, reference)} <= whole
        else []
        for point, label in keys
    }
    names = _runs_by_key(runs)
    tests = [(names.get(key, key), names.get((key[0], reference), (key[0], reference))) for key in keys]
    p_values = holm([None if unit == "bytes" else paired_p(differences[key]) for key in keys], tests)
    result = []
    for (point, label), p in zip(keys, p_values, strict=True):
        known = list(values[point][label].values())
        missing = lacks[point, label]
        mean, spread = mean_and_spread(known) if not missing else (None, None)
        difference = mean_and_spread(differences[point, label])
        result.append(
            Summary(
                label, point, len(known), missing, failed.get((point, label), 0), wanted, mean, spread, *difference, p
            )
        )
    return result


@dataclass(frozen=True)
class EqualBytes:
    """A method beside the reference, each after the last scored round within the bytes of the cheaper run of a pair.

    Attributes:
        label: Label of the method.
        point: The grid point.
        seeds: Number of seeds with a difference.
        wanted: Number of seeds of the experiment.
        difference, difference_spread: Mean and standard deviation of the paired difference from the reference; None if
            a seed lacks it, such as one in which the bytes of the cheaper run are not enough for a round of the other.
        p: Two-sided p value of a paired t test, by Holm's method for all methods and grid points.
        rounds: The method's rounds, the mean over seeds; None without a difference.
        reference_rounds: Those of the reference.
    """

    label: str
    point: str
    seeds: int
    wanted: int
    difference: float | None
    difference_spread: float | None
    p: float | None
    rounds: float | None
    reference_rounds: float | None


_Curve = Sequence[tuple[float, float | None]]
"""Bytes until the end of each round, and a metric; None where it was not scored."""


def at_equal_bytes(
    curves: Mapping[tuple[str, str], Mapping[int, _Curve]], reference: str, wanted: int, runs: Runs = _NO_RUNS
) -> list[EqualBytes]:
    """Compares each method with the reference at equal bytes, by grid point; without those that were never scored.

    Args:
        curves: A metric by grid point and label, then by seed.
        reference: Label from which differences are.
        wanted: Number of seeds of the experiment.
        runs: Names of the runs; by default every cell has a run of its own.
    """
    names = _runs_by_key(runs)
    found = {}
    for (point, label), of in curves.items():
        others = curves.get((point, reference), {})
        if label != reference and _is_scored(of) and _is_scored(others):
            of_seeds = [_at_equal_bytes(curve, others[seed]) for seed, curve in of.items() if seed in others]
            found[point, label] = [pair for pair in of_seeds if pair is not None]
    differences = {
        key: [mine - other for (_, mine), (_, other) in pairs] if len(pairs) >= wanted else []
        for key, pairs in found.items()
    }
    tests = [(names.get(key, key), names.get((key[0], reference), (key[0], reference))) for key in found]
    p_values = holm(list(map(paired_p, differences.values())), tests)
    result = []
    for ((point, label), pairs), p in zip(found.items(), p_values, strict=True):
        rounds = [statistics.mean(number for number, _ in of) for of in zip(*pairs, strict=True)] or [None, None]
        difference = mean_and_spread(differences[point, label])
        result.append(EqualBytes(label, point, len(pairs), wanted, *difference, p, *rounds))
    return result


def _is_scored(curves: Mapping[int, _Curve]) -> bool:
    return any(value is not None for curve in curves.values() for _, value in curve)


def _at_equal_bytes(curve: _Curve, other: _Curve) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """Returns the last scored round of each within the bytes of the cheaper one, with its metric; None without one."""
    budget = min(curve[-1][0], other[-1][0]) * (1 + _HEADERS)
    mine, others = (
        [(number, value) for number, (spent, value) in enumerate(of, 1) if value is not None and spent <= budget]
        for of in (curve, other)
    )
    return (mine[-1], others[-1]) if mine and others else None


def significant_ratio(seeds: int, comparisons: int) -> float | None:
    """Returns how many times its spread a mean difference must be to be significant at 5 %, by Holm's first step.

    Args:
        seeds: Number of pairs; None is returned for fewer than two.
        comparisons: Number of comparisons, at least 1.
    """
    if seeds < 2:
        return None
    from scipy import stats

    return float(stats.t.ppf(1 - LEVEL / 2 / comparisons, seeds - 1) / seeds**0.5)


@dataclass(frozen=True)
class Pair:
    """Two methods of a claim's order, compared over grid points and seeds.

    Attributes:
        better, worse: Labels in the order that is claimed.
        pairs: Number of pairs of runs, one of each. A pair that several grid points share, since neither method has
            the grid's setting, counts once.
        wins: Number of these in which `better` is ahead.
        seeds: Number of seeds that have a pair.
        wanted: Number of seeds of the experiment.
        difference: Mean over seeds of its mean lead over the grid points, above 0 if it is ahead; None without pairs.
        p: Two-sided p value of a t test of the seeds' mean leads, by Holm's method for the pairs of all claims; equal
            ones count once. Grid points of one seed share its data and initial weights, so they are one value.
        left: Number of runs of both that have not finished; there is no p value then.
        verdict: `holds`, `does not hold` (the order is the opposite one), `equal` without any difference, or `not
            decided` at the level of 5 %. With unfinished runs there is none, and it says how many they are.
    """

    better: str
    worse: str
    pairs: int
    wins: int
    seeds: int
    wanted: int
    difference: float | None
    p: float | None
    left: int

    @property
    def verdict(self) -> str:
        if self.left:
            return f"none yet: {counted(self.left, 'run')} not finished"
        if self.difference == 0 and self.p is None:
            return "equal"
        if self.difference is None or self.p is None or self.p > LEVEL:
            return "not decided"
        return "holds" if self.difference > 0 else "does not hold"


def check_claims(
    claims: Sequence[tuple[Claim, str]],
    values: Mapping[str, Values],
    finished: Mapping[tuple[str, str], int],
    wanted: int,
    runs: Runs = _NO_RUNS,
) -> list[list[Pair]]:
    """Compares each method of each claim with the next one of its order.

    Args:
        claims: The claims, each with its metric.
        values: The values of each metric.
        finished: Number of finished runs by point and label.
        wanted: Number of seeds of the experiment.
        runs: Names of the runs; by default every cell has a run of its own.
    """
    names = _runs_by_key(runs)
    result: list[list[Pair]] = []
    tests: list[Hashable] = []
    for claim, metric in claims:
        known, sign = values[metric], 1 if METRICS[metric].higher_is_better else -1
        points = [point for point in known if not claim.at or point in claim.at]
        result.append([])
        for pair in zip(claim.order, claim.order[1:], strict=False):
            one, other = pair
            leads: dict[tuple[int, frozenset[Hashable]], float] = {
                (seed, frozenset(runs.get((point, label, seed), (point, label, seed)) for label in pair)): sign
                * difference(value, known[point][other][seed], METRICS[metric].unit)
                for point in points
                for seed, value in known[point].get(one, {}).items()
                if seed in known[point].get(other, {})
            }
            left = {
                names.get((point, label), (point, label)): max(0, wanted - finished.get((point, label), 0))
                for point in points
                for label in pair
            }
            by_seed = {seed: [lead for (of, _), lead in leads.items() if of == seed] for seed, _ in leads}
            means, missing = list(map(statistics.mean, by_seed.values())), sum(left.values())
            result[-1].append(
                Pair(
                    better=one,
                    worse=other,
                    pairs=len(leads),
                    wins=sum(lead > 0 for lead in leads.values()),
                    seeds=len(means),
                    wanted=wanted,
                    difference=statistics.mean(means) if means else None,
                    p=None if missing else paired_p(means),
                    left=missing,
                )
            )
            tests.append((metric, frozenset(leads) or pair))
    adjusted = iter(holm([pair.p for of in result for pair in of], tests))
    return [[replace(pair, p=next(adjusted)) for pair in of] for of in result]
