"""The results of a simulation, from its report.json: accuracies on the global test set, controls and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdistill_console.tracking.run_figures import mean_of
from fleetdistill_console.tracking.tracker import RoundPoint

ACCURACY, BYTES = "simulation/accuracy", "simulation/bytes"
"""Mean accuracy over the devices on the global test set, and bytes from and to a device since the start."""
ALONE = "local training only"


@dataclass(frozen=True)
class Results:
    """What report.json adds to a run of the store.

    Attributes:
        finished: Whether the simulation has ended.
        points: Figures of the method's rounds.
        controls: Figures of each control's rounds, by the control's name.
        files: Files by the path under which they are shown.
    """

    finished: bool
    points: Sequence[RoundPoint]
    controls: dict[str, list[RoundPoint]] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def results_in(out: Path, rounds: Sequence[int]) -> Results | None:
    """Reads the results of a simulation.

    Args:
        out: Folder of the simulation.
        rounds: Numbers of the completed rounds, ascending.

    Returns:
        The results; None if there is no report yet.
    """
    file = out / "report.json"
    if not file.exists():
        return None
    report = json.loads(file.read_text())
    at = file.stat().st_mtime
    own = [item for item in report["curves"] if not _is_control(item, report)]
    controls = {item["name"]: _points([(item, "")], None, at) for item in report["curves"] if _is_control(item, report)}
    alone = report["alone_accuracy_by_round"]
    if alone:
        means = [mean_of(rates) for rates in zip(*alone.values(), strict=True)]
        controls[ALONE] = _points([({"accuracy": means, "bytes": []}, "")], None, at)
    first = own[0]["name"] if own else ""
    named = [(item, "" if item is own[0] else "_" + item["name"].removeprefix(first).strip()) for item in own]
    finished = bool(report["finished"])
    return Results(finished, _points(named, rounds, at), controls, _files(out) if finished else {})


def _is_control(curve: dict[str, Any], report: dict[str, Any]) -> bool:
    return report["method"] != "fedavg" and str(curve["name"]).startswith("FedAvg")


def _points(curves: Sequence[tuple[dict[str, Any], str]], rounds: Sequence[int] | None, at: float) -> list[RoundPoint]:
    """Returns the figures of each round; rounds without numbers are counted from 1."""
    count = max((len(one["accuracy"]) for one, _ in curves), default=0)
    result: list[dict[str, float]] = [{} for _ in range(count)]
    for curve, suffix in curves:
        for values, name in ((curve["accuracy"], ACCURACY), (curve["bytes"], BYTES)):
            for index, value in enumerate(values[:count]):
                if value is not None and (name == ACCURACY or not suffix):
                    result[index][name + suffix.replace(" ", "_")] = value
    numbers = range(1, count + 1) if rounds is None else rounds
    return [RoundPoint(number, at, values) for number, values in zip(numbers, result, strict=False) if values]


def _files(out: Path) -> dict[str, Path]:
    wanted = [out / "report.json", out / "fleet.png", *sorted((out / "onnx").rglob("*.onnx"))]
    return {path.relative_to(out).as_posix(): path for path in wanted if path.exists()}
