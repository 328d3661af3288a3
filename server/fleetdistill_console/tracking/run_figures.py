"""A run of the store as a tracker shows it: settings, and figures of its ended rounds."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetdistill_console.tracking.tracker import Points
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import AnswerCounts, Round
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.views.figures import server_figures

_SPLITS = ("train", "validation", "test")
_MAX_VARIANTS = 4
"""Largest number of variants with figures of their own, because devices choose the variants' names."""
_MAX_CHARACTERS = 40


def settings_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested settings by names with dots, such as `run.method`; leaves out what is not set."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= settings_of(value, f"{prefix}{name}.")
        elif value not in (None, ""):
            found[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return found


def points_since(store: Store, run: str, after: int) -> list[Points]:
    """Returns the figures of the rounds of a run that ended after a round, by ascending number.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        after: Number of a round; 0 for all rounds.
    """
    reported = defaultdict[int, list[Row]](list)
    sent = defaultdict[int, dict[str, float]](lambda: {"bytes/up": 0.0, "bytes/down": 0.0})
    span = (run, after + 1, EVERY)
    # Before their figures: a round that ends between two reads would lack some, and might not be read again.
    rounds = store.summaries.rounds(*span)
    for row in store.summaries.mean_figures_by_split(*span):
        reported[row["round"]].append(row)
    for row in store.summaries.bytes(run, ("round",), *span[1:]):
        sent[row["round"]][f"bytes/{row['direction']}"] = row["sent"]
    guards = store.summaries.guards(*span)
    found = []
    for ended, answers in rounds:
        number = ended.number
        if ended.status in (RoundStatus.CLOSED, RoundStatus.SHORT) and ended.ended_at is not None:
            values = _values(ended, answers, reported[number])
            values |= {**sent[number], "round/guards": float(guards.get(number, 0))}
            found.append(Points(number, ended.ended_at, _finite(values)))
    return found


def _values(ended: Round, answers: AnswerCounts, reported: Sequence[Row]) -> dict[str, float]:
    of_server = server_figures(ended.figures)
    accuracies = {f"accuracy/{name}": of_server.pop(f"{name}_accuracy", None) for name in ("server", "global")}
    values = {
        "round/completed": ended.status is RoundStatus.CLOSED,
        "round/devices": len(ended.cohort),
        "round/used": answers.used,
        "round/reported": answers.reported,
        "round/seconds": ended.seconds,
        **dict(_device_figures(reported)),
        **accuracies,
        **{f"server/{name}": value for name, value in of_server.items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _device_figures(reported: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Yields means over devices: `loss/train`, `accuracy/test`, and `accuracy/test_personal` of a variant."""
    known = [row for row in reported if row["split"] in _SPLITS]
    for row in known:
        if row["name"] in ("loss", "accuracy"):
            yield f"{row['name']}/{row['split']}", row["mean"]
    of_variants = [row for row in known if row["name"].endswith("/accuracy") and row["split"] == "test"]
    for row in sorted(of_variants, key=lambda row: (-row["devices"], row["name"]))[:_MAX_VARIANTS]:
        yield f"accuracy/test_{_plain(row['name'].removesuffix('/accuracy'))}", row["mean"]


def _plain(name: str) -> str:
    """Returns a name with the characters that every tracker accepts."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:_MAX_CHARACTERS]


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def mean_of(rates: Iterable[float | None]) -> float | None:
    """Returns the mean of the known rates, or None."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None
