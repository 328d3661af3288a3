"""The metrics of an experiment's tables, read from the report of a run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fleetdistill_lab.simulation.report.metrics import CurveSummary, rounds_to, summarize

__all__ = ["CURVES", "METRICS", "Metric", "Report", "Target", "curve_of", "read_metrics"]

Report = Mapping[str, Any]
"""Contents of report.json."""
_Level = float | dict[str, float]


class Target(BaseModel):
    """Levels of a metric that a run is to reach.

    Attributes:
        metric: Name in `CURVES`.
        level: The level, as the metric has it, or a level by data set; accuracies are in [0, 1].
        second_level: A further level; None for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Literal["global", "trained", "c_gen", "c_spec", "c_per"] = "global"
    level: _Level
    second_level: _Level | None = None

    def of(self, dataset: str, name: str = "level") -> float | None:
        """Returns the level for a data set; None if it has none."""
        given: float | dict[str, float] | None = getattr(self, name)
        return given.get(dataset) if isinstance(given, dict) else given


@dataclass(frozen=True)
class Metric:
    """A figure of a run.

    Attributes:
        title: What a table says.
        read: Returns the figure of a report, None if the run has none.
        unit: `percent` for a rate in [0, 1], else what the figure counts.
        higher_is_better: Whether a larger figure is better.
        needs_target: The experiment's level that the figure is about; empty for none.
    """

    title: str
    read: Callable[[Report, Target | None], float | None]
    unit: Literal["percent", "bytes", "number", "seconds"] = "percent"
    higher_is_better: bool = True
    needs_target: Literal["", "level", "second_level"] = ""


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
    "trained": _device_curve,
    **{name: _figures_curve(name) for name in ("c_gen", "c_spec", "c_per")},
}
"""Metrics with a value after each round: of the global model, and of the device models after local training."""


def _first(name: str) -> Callable[[Report, Target | None], float | None]:
    """Reads the comparison's first row: the models that the devices have, or their general variant."""
    return lambda report, target: report["comparison"][0][name]


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


def _summary(
    name: str, figure: Callable[[CurveSummary], float | None]
) -> Callable[[Report, Target | None], float | None]:
    return lambda report, target: figure(summarize(curve_of(report, name)))


def _fairness(name: str) -> Callable[[Report, Target | None], float | None]:
    """Reads a spread of the accuracies whose mean is `own_accuracy`."""

    def read(report: Report, target: Target | None) -> float | None:
        personal = [row["own_fairness"] for row in report["comparison"] if row["name"].endswith("personal")]
        spread = personal[0] if personal else report["own_fairness_fleet"]
        return None if spread is None else float(spread[name])

    return read


def _rounds(report: Report, target: Target | None, name: str = "level") -> int | None:
    assert target is not None
    level = target.of(report["dataset"], name)
    return None if level is None else rounds_to(curve_of(report, target.metric), level)


def _spent(name: str) -> Callable[[Report, Target | None], float | None]:
    """Reads a mean over devices that a run had spent when it reached the target."""

    def read(report: Report, target: Target | None) -> float | None:
        hit = _rounds(report, target)
        return None if hit is None else float(report["curves"][0]["spent"][hit - 1][name])

    return read


def _bytes_to_target(report: Report, target: Target | None) -> float | None:
    hit = _rounds(report, target)
    return None if hit is None else sum(item["up"] + item["down"] for item in report["bytes_by_round"][:hit])


def _to_target(
    title: str, read: Callable[[Report, Target | None], float | None], unit: Literal["bytes", "number"] = "number"
) -> Metric:
    return Metric(f"{title} to the target", read, unit, higher_is_better=False, needs_target="level")


_FIGURES = {"global": "Global model", "c_gen": "C-Gen", "c_spec": "C-Spec", "c_per": "C-Per"}
"""CDKT-FL's four figures with their titles."""
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("Accuracy on all classes, model at the end", _field("mean_accuracy_fleet")),
    "own_accuracy": Metric("Accuracy on own classes, (personal) model at the end", _own_accuracy),
    "trained": Metric("Accuracy on all classes, after local training", _field("mean_accuracy_trained")),
    "own_trained": Metric("Accuracy on own classes, after local training (or personal model)", _own_trained),
    "global": Metric("Accuracy of the global model", _summary("global", lambda of: of.final)),
    "global_best": Metric("Accuracy of the global model, best round", _summary("global", lambda of: of.best)),
    "global_late": Metric(
        "Accuracy of the global model, mean of the last 10 rounds", _summary("global", lambda of: of.last_mean)
    ),
    "c_gen": Metric("C-Gen", _score("accuracy", "c_gen")),
    "c_spec": Metric("C-Spec", _score("accuracy", "c_spec")),
    "c_spec_samples": Metric("C-Spec over samples", _score("accuracy", "c_spec_samples")),
    "c_per": Metric("C-Per", _score("accuracy", "c_per")),
    **{
        f"{name}_median": Metric(
            f"{title}, median of the last 20 rounds", _summary(name, lambda of: of.box.median if of.box else None)
        )
        for name, title in _FIGURES.items()
    },
    **{
        f"{name}_quartiles": Metric(
            f"{title}, distance of the quartiles of the last 20 rounds",
            _summary(name, lambda of: of.box.upper_quartile - of.box.lower_quartile if of.box else None),
            higher_is_better=False,
        )
        for name, title in _FIGURES.items()
    },
    "ua": Metric("Average user accuracy, mean of the last 10 rounds", _late("ua_mean")),
    "own_worst": Metric(
        "Accuracy on own classes, (personal) model at the end, worst tenth of the devices", _fairness("worst")
    ),
    "own_std": Metric(
        "Standard deviation over devices of the accuracies on own classes, (personal) model at the end",
        _fairness("std"),
        higher_is_better=False,
    ),
    "own_jain": Metric("Jain's index of the accuracies on own classes, (personal) model at the end", _fairness("jain")),
    "top_k": Metric("Top-k accuracy of the devices' models on all classes", _first("top_k")),
    "f1_weighted": Metric("Weighted F1 on all classes, model at the end", _field("mean_f1_weighted_fleet")),
    "f1_macro": Metric("Macro F1 on all classes, model at the end", _field("mean_f1_macro_fleet")),
    **{
        f"{name}_f1_{mean}": Metric(f"{title} in {mean} F1", _score(f"f1_{mean}", name))
        for name, title in _FIGURES.items()
        for mean in ("weighted", "macro")
    },
    "rounds_to_target": _to_target("Rounds", _rounds),
    "rounds_to_second_target": Metric(
        "Rounds to the second target",
        lambda report, target: _rounds(report, target, "second_level"),
        "number",
        higher_is_better=False,
        needs_target="second_level",
    ),
    "bytes_to_target": _to_target("Bytes of a device", _bytes_to_target, "bytes"),
    "exchanges_to_target": _to_target("Exchanges of a device", _spent("exchanges")),
    "steps_to_target": _to_target("Mini-batch steps of a device", _spent("steps")),
    "bytes": Metric("Bytes from and to a device", _first("bytes"), "bytes", higher_is_better=False),
    "exchanges": Metric("Exchanges of a device", _first("exchanges"), "number", higher_is_better=False),
    "seconds": Metric("Seconds of the run", _field("seconds"), "seconds", higher_is_better=False),
}
"""Metrics by the name that a file uses."""


def read_metrics(report: Report, target: Target | None) -> dict[str, float | None]:
    """Returns all metrics of a report by name, those about a target only if there is one."""
    known = {name: metric for name, metric in METRICS.items() if target is not None or not metric.needs_target}
    return {name: metric.read(report, target) for name, metric in known.items()}
