"""What differs between the results of two experiments, or of two runs of one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from fleetdistill_lab.experiments.metrics import METRICS
from fleetdistill_lab.experiments.results import FINISHED, Results
from fleetdistill_lab.experiments.summary import holm, paired_p

__all__ = ["Change", "changed_definition", "changed_results", "changed_versions", "shared_cells"]

_VARIES = ("seconds",)
"""Metrics that differ from one repetition to the next."""


@dataclass(frozen=True)
class Change:
    """A metric of a method at a grid point in two experiments, over the seeds that both have.

    Attributes:
        label: Label of the method.
        point: The grid point.
        metric: Name of the metric.
        before, after: Means.
        seeds: Number of seeds.
        p: Two-sided p value of a paired t test, by Holm's method for all changes; None if it cannot be computed.
            Grid points that share their runs count once.
        same_settings: Whether the runs have the same settings, so that only the software can have made the difference.
    """

    label: str
    point: str
    metric: str
    before: float
    after: float
    seeds: int
    p: float | None
    same_settings: bool


def changed_results(first: Results, second: Results, metrics: list[str]) -> list[Change]:
    """Returns the metrics that differ, in the order of the first experiment's cells."""
    found = list(_differences(first, second, metrics))
    p_values = holm([paired_p(differences) for *_, differences in found], [test for _, test, _ in found])
    return [Change(**known, p=p) for (known, *_), p in zip(found, p_values, strict=True)]


def shared_cells(first: Results, second: Results) -> int:
    """Returns how many cells, each a method at a grid point with a seed, have finished in both experiments."""
    cells = [
        {(cell.label, cell.point, cell.seed) for cell in one.cells() if cell.run in finished}
        for one, finished in ((first, first.finished()), (second, second.finished()))
    ]
    return len(cells[0] & cells[1])


def _differences(
    first: Results, second: Results, metrics: list[str]
) -> Iterator[tuple[dict[str, Any], Hashable, list[float]]]:
    """Yields each change without its p value, the metric with the pairs of runs it is of, and the differences."""
    runs = [first.run_names(), second.run_names()]
    for metric in metrics or [name for name in METRICS if name not in _VARIES]:
        others = second.values(metric)
        for point, labels in first.values(metric).items():
            for label, values in labels.items():
                other = others.get(point, {}).get(label, {})
                seeds = [seed for seed in values if seed in other]
                differences = [other[seed] - values[seed] for seed in seeds]
                pairs = [(runs[0][point, label, seed], runs[1][point, label, seed]) for seed in seeds]
                if any(differences):
                    yield (
                        {
                            "label": label,
                            "point": point,
                            "metric": metric,
                            "before": statistics.mean(values[seed] for seed in seeds),
                            "after": statistics.mean(other[seed] for seed in seeds),
                            "seeds": len(seeds),
                            "same_settings": all(one == other for one, other in pairs),
                        },
                        (metric, *pairs),
                        differences,
                    )


def changed_definition(first: Results, second: Results) -> list[str]:
    """Returns sentences about methods, grid points, seeds and settings that only one experiment has."""
    result = []
    cells = [{(cell.label, cell.point, cell.seed): cell.run for cell in one.cells()} for one in (first, second)]
    for title, at in (("method", 0), ("grid point", 1), ("seed", 2)):
        names = [dict.fromkeys(key[at] for key in of) for of in cells]
        result += [f"{title} {name} is only in the first" for name in names[0] if name not in names[1]]
        result += [f"{title} {name} is only in the second" for name in names[1] if name not in names[0]]
    settings = [{run.run: run.settings for run in one.runs().values()} for one in (first, second)]
    sentences: dict[str, None] = {}
    for key, run in cells[0].items():
        other = cells[1].get(key)
        if other is None or other == run or run not in settings[0] or other not in settings[1]:
            continue
        old, new = (_flat(of[name]) for of, name in ((settings[0], run), (settings[1], other)))
        for name in dict.fromkeys((*old, *new)):
            if old.get(name) != new.get(name):
                sentences[f"{key[0]}: {name} was {old.get(name, 'the default')}, is {new.get(name, 'the default')}"] = (
                    None
                )
    return result + list(sentences)


def _flat(sections: Any) -> dict[str, str]:
    return {
        f"{section}.{name}": json.dumps(value, default=str)
        for section, values in sections.items()
        for name, value in values.items()
    }


def changed_versions(first: Results, second: Results) -> list[str]:
    """Returns sentences about packages whose versions differ."""
    versions = [
        {
            (name, number)
            for run in one.runs().values()
            if run.status == FINISHED
            for name, number in run.versions.items()
        }
        for one in (first, second)
    ]
    result = []
    for name in sorted({name for name, _ in versions[0] ^ versions[1]}):
        old, new = (", ".join(sorted(number for other, number in of if other == name)) for of in versions)
        result.append(f"{name} was {old or 'not there'}, is {new or 'not there'}")
    return result
