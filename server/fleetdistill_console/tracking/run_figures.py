"""A run as a tracker shows it: settings, figures of its ended rounds, and the results of a simulation's report.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdistill_console.tracking.tracker import RoundPoint
from fleetdistill_server.store.run_figures import Reported, RoundFigures, round_figures
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store

_SPLITS = ("train", "validation", "test")
_MAX_VARIANTS = 4
"""Largest number of variants with figures of their own, because devices choose the variants' names."""
_MAX_CHARACTERS = 40
ACCURACY, BYTES = "simulation/accuracy", "simulation/bytes"
"""Mean accuracy over the devices on the global test set, and bytes from and to a device since the start."""
ALONE = "local training only"


def settings_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested settings by names with dots, such as `run.method`; leaves out what is not set."""
    result: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            result |= settings_of(value, f"{prefix}{name}.")
        elif value not in (None, ""):
            result[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return result


def points_since(store: Store, run: str, after: int) -> list[RoundPoint]:
    """Returns the figures of the rounds of a run that ended after a round, by ascending number.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        after: Number of a round; 0 for all rounds.
    """
    return [
        RoundPoint(figures.round.number, figures.round.ended_at, _values(figures))
        for figures in round_figures(store.database, run, after + 1)
        if figures.round.status in (RoundStatus.CLOSED, RoundStatus.SHORT) and figures.round.ended_at is not None
    ]


def _values(figures: RoundFigures) -> dict[str, float]:
    of_server = {**figures.method, "global_accuracy": figures.global_accuracy}
    values = {
        "round/completed": figures.round.status is RoundStatus.CLOSED,
        "round/devices": len(figures.round.cohort),
        "round/used": figures.answers.used,
        "round/reported": figures.answers.reported,
        "round/seconds": figures.round.seconds,
        "round/guards": figures.guards,
        **dict(_device_figures(figures.reported)),
        **{f"server/{_plain(name)}": value for name, value in of_server.items()},
        "bytes/up": figures.bytes_up,
        "bytes/down": figures.bytes_down,
    }
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _device_figures(reported: Mapping[tuple[str, str], Reported]) -> Iterator[tuple[str, float]]:
    """Yields means over devices: `loss/train`, `accuracy/test`, and `accuracy/test_personal` of a variant."""
    for (name, split), result in reported.items():
        if name in ("loss", "accuracy") and split in _SPLITS:
            yield f"{name}/{split}", result.mean
    of_variants = [key for key in reported if key[0].endswith("/accuracy") and key[1] == "test"]
    for key in sorted(of_variants, key=lambda key: (-reported[key].devices, key))[:_MAX_VARIANTS]:
        yield f"accuracy/test_{_plain(key[0].removesuffix('/accuracy'))}", reported[key].mean


def _plain(name: str) -> str:
    """Returns a name with the characters that every tracker accepts."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:_MAX_CHARACTERS]


def mean_of(rates: Iterable[float | None]) -> float | None:
    """Returns the mean of the known rates, or None."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


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
    wanted = [
        out / "report.json",
        *(out / f"fleet.{kind}" for kind in ("png", "pdf", "svg")),
        *sorted((out / "onnx").rglob("*.onnx")),
    ]
    return {path.relative_to(out).as_posix(): path for path in wanted if path.exists()}
