"""The metrics of an experiment's tables, read from the report of a run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["CURVES", "METRICS", "Metric", "Report", "Target", "curve_of", "read_metrics"]

Report = Mapping[str, Any]
"""Contents of report.json."""


class Target(BaseModel):
    """Level of a metric that a run is to reach.

    Attributes:
        metric: Name in `CURVES`.
        level: The level, as the metric has it; accuracies are in [0, 1].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Literal["global", "accuracy", "c_gen", "c_spec", "c_per"] = "global"
    level: float


@dataclass(frozen=True)
class Metric:
    """A figure of a run.

    Attributes:
        title: What a table says.
        read: Returns the figure of a report, None if the run has none.
        unit: `percent` for a rate in [0, 1], `points` ..., see `tables.show`.
        higher_is_better: Whether a larger figure is better.
        needs_target: Whether the figure is about the experiment's target.
    """

    title: str
    read: Callable[[Report, Target | None], float | None]
    unit: Literal["percent", "bytes", "number", "seconds"] = "percent"
    higher_is_better: bool = True
    needs_target: bool = False


def curve_of(report: Report, name: str) -> list[float | None]:
    """Returns a metric after each completed round; None where it was not scored.

    Args:
        report: The report.
        name: Name in `CURVES`.
    """
    return CURVES[name](report)


def _device_curve(report: Report) -> list[float | None]:
    by_round = itertools.zip_longest(*report["accuracy_by_round"].values())
    known = [[rate for rate in rates if rate is not None] for rates in by_round]
    return [statistics.mean(rates) if rates else None for rates in known]


def _figures_curve(name: str) -> Callable[[Report], list[float | None]]:
    return lambda report: [figures[name] for figures in report["figures_by_round"]]


CURVES: Mapping[str, Callable[[Report], list[float | None]]] = {
    "global": lambda report: report["global_accuracy_by_round"],
    "accuracy": _device_curve,
    **{name: _figures_curve(name) for name in ("c_gen", "c_spec", "c_per")},
}
"""Metrics with a value after each round: of the global model, and of the device models, by name."""


def _top(report: Report) -> Mapping[str, Any]:
    """Returns the comparison's first row: the models that the devices have, or their general variant."""
    row: Mapping[str, Any] = report["comparison"][0]
    return row


def _field(name: str) -> Callable[[Report, Target | None], float | None]:
    return lambda report, target: report[name]


def _score(score: str, figure: str) -> Callable[[Report, Target | None], float | None]:
    return lambda report, target: report["scores"]["fleet"][score][figure]


def _late(name: str) -> Callable[[Report, Target | None], float | None]:
    return lambda report, target: report["late"][name]


def _own_accuracy(report: Report, target: Target | None) -> float | None:
    """Returns the accuracy on own classes of the personal models, or of the devices' models without those."""
    personal = report["further"].get("personal")
    rate: float | None = personal["own_accuracy"] if personal else report["mean_own_accuracy_fleet"]
    return rate


def _own_trained(report: Report, target: Target | None) -> float | None:
    personal = report["further"].get("personal")
    rate: float | None = personal["own_accuracy"] if personal else report["mean_own_accuracy_trained"]
    return rate


def _known(curve: Sequence[float | None]) -> list[float]:
    return [rate for rate in curve if rate is not None]


def _best_global(report: Report, target: Target | None) -> float | None:
    return max(_known(report["global_accuracy_by_round"]), default=None)


def _late_global(report: Report, target: Target | None) -> float | None:
    last = _known(report["global_accuracy_by_round"][-10:])
    return statistics.mean(last) if last else None


def _rounds_to_target(report: Report, target: Target | None) -> int | None:
    assert target is not None
    rates = enumerate(curve_of(report, target.metric), 1)
    return next((number for number, rate in rates if rate is not None and rate >= target.level), None)


def _rounds(report: Report, target: Target | None) -> float | None:
    return _rounds_to_target(report, target)


def _bytes_to_target(report: Report, target: Target | None) -> float | None:
    hit = _rounds_to_target(report, target)
    return None if hit is None else sum(item["up"] + item["down"] for item in report["bytes_by_round"][:hit])


def _sum_to_target(name: str) -> Callable[[Report, Target | None], float | None]:
    def read(report: Report, target: Target | None) -> float | None:
        hit = _rounds_to_target(report, target)
        return None if hit is None or name not in report else sum(report[name][:hit])

    return read


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("Accuracy of the devices' models on all classes", _field("mean_accuracy_fleet")),
    "own_accuracy": Metric("Accuracy of the devices' (personal) models on their own classes", _own_accuracy),
    "trained": Metric("Accuracy after local training, on all classes", _field("mean_accuracy_trained")),
    "own_trained": Metric(
        "Accuracy after local training, on own classes (personal models if there are any)", _own_trained
    ),
    "global": Metric("Accuracy of the global model", _score("accuracy", "global")),
    "global_best": Metric("Accuracy of the global model, best round", _best_global),
    "global_late": Metric("Accuracy of the global model, mean of the last 10 rounds", _late_global),
    "c_gen": Metric("C-Gen", _score("accuracy", "c_gen")),
    "c_spec": Metric("C-Spec", _score("accuracy", "c_spec")),
    "c_per": Metric("C-Per", _score("accuracy", "c_per")),
    "c_gen_median": Metric("C-Gen, median of the last 20 rounds", _late("c_gen_median")),
    "c_spec_median": Metric("C-Spec, median of the last 20 rounds", _late("c_spec_median")),
    "c_per_median": Metric("C-Per, median of the last 20 rounds", _late("c_per_median")),
    "ua": Metric("Average user accuracy, mean of the last 10 rounds", _late("ua_mean")),
    "f1_weighted": Metric("Weighted F1 of the device models on all classes", _score("f1_weighted", "c_gen")),
    "f1_macro": Metric("Macro F1 of the device models on all classes", _score("f1_macro", "c_gen")),
    "rounds_to_target": Metric("Rounds to the target", _rounds, "number", False, True),
    "bytes_to_target": Metric("Bytes of a device to the target", _bytes_to_target, "bytes", False, True),
    "exchanges_to_target": Metric(
        "Exchanges of a device to the target", _sum_to_target("exchanges_by_round"), "number", False, True
    ),
    "steps_to_target": Metric(
        "Mini-batch steps of a device to the target", _sum_to_target("steps_by_round"), "number", False, True
    ),
    "bytes": Metric("Bytes from and to a device", lambda report, target: _top(report)["bytes"], "bytes", False),
    "exchanges": Metric("Exchanges of a device", lambda report, target: _top(report)["exchanges"], "number", False),
    "seconds": Metric("Seconds of the run", _field("seconds"), "seconds", False),
}
"""Metrics by the name that a file uses."""


def read_metrics(report: Report, target: Target | None) -> dict[str, float | None]:
    """Returns all metrics of a report by name, those about a target only if there is one."""
    known = {name: metric for name, metric in METRICS.items() if target is not None or not metric.needs_target}
    return {name: metric.read(report, target) for name, metric in known.items()}
