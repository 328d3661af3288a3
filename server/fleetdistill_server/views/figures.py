"""A run's figures by round: losses, accuracies, answers and bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import AnswerCounts, Round
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.views.suspects import suspects_by_round


def rounds(store: Store, run: str, first: int = 0, last: int = EVERY) -> list[Row]:
    """Returns one row for each round from `first` to `last`, ordered by round."""
    span = (run, first, last)
    guards = store.summaries.guards(*span)
    means = {(row["round"], row["name"]): round(row["mean"], 4) for row in store.summaries.mean_figures(*span)}
    replaced = {row["round"]: row for row in store.summaries.replacements(*span)}
    suspects = suspects_by_round(store, run)
    sent: defaultdict[int, Row] = defaultdict(lambda: dict.fromkeys(("bytes_up", "bytes_down"), 0))
    for row in store.summaries.bytes(run, ("round",), *span[1:]):
        sent[row["round"]][f"bytes_{row['direction']}"] = row["sent"]
    found = []
    for shown, answers in store.summaries.rounds(*span):
        number = shown.number
        cells = {
            "guards": guards.get(number, 0),
            **replacement_cells(replaced.get(number)),
            "seconds": None if shown.seconds is None else round(shown.seconds, 2),
            "train_loss": means.get((number, "loss")),
            "test_accuracy": means.get((number, "accuracy")),
        }
        last_cells = {"suspects": ", ".join(suspects.get(number, ())), **sent[number]}
        found.append({**_head(shown, answers), **cells, **_method_cells(shown.figures), **last_cells})
    return found


def replacement_cells(row: Row | None) -> Row:
    """Returns how many app models were kept and replaced; both are None if no app has validation data."""
    return {name: None if row is None else int(row[name]) for name in ("kept", "replaced")}


def _head(shown: Round, answers: AnswerCounts) -> Row:
    return {
        "round": shown.number,
        "status": f"{shown.status}: {shown.reason}" if shown.reason else str(shown.status),
        "cohort": len(shown.cohort),
        "used": answers.used,
        "reported": answers.reported,
    }


def _method_cells(figures: Mapping[str, Any]) -> Row:
    """Returns the figures that the server half of the method reported."""
    numbers = {name: round(value, _DIGITS[name]) for name, value in server_figures(figures).items() if name in _DIGITS}
    return {
        "server_accuracy": numbers.get("server_accuracy"),
        "cut_layers": ", ".join(f"{n} x {cut}" for cut, n in Counter(figures.get("cut_layer", {}).values()).items()),
        "distillation_steps": figures.get("distillation_steps"),
        "effective_devices": numbers.get("effective_devices"),
        "strength": figures.get("strength"),
        "global_accuracy": numbers.get("global_accuracy"),
        "refined": ", ".join(f"{count} {tag}" for tag, count in figures.get("refined_rows", {}).items()),
    }


_DIGITS = {"server_accuracy": 4, "global_accuracy": 4, "effective_devices": 2}


def server_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among the figures that the method reported for a round, where the method has them.

    Args:
        figures: The round's figures, as in the store.

    Returns:
        `server_accuracy` and `global_accuracy` in [0, 1], `distillation_steps`, `effective_devices` and `strength`.
    """
    teacher = figures.get("teacher_accuracy", {})
    found = {"server_accuracy": sum(teacher.values()) / len(teacher)} if teacher else {}
    names = ("global_accuracy", "distillation_steps", "effective_devices", "strength")
    return found | {name: figures[name] for name in names if figures.get(name) is not None}


def bytes_by_device(store: Store, run: str) -> list[Row]:
    """Returns per device: uncompressed bytes of tensors and headers, header bytes, and bytes on the link."""
    rows: dict[str, Row] = {}
    nothing = dict.fromkeys(("up", "down", "envelope_bytes", "up_sent", "down_sent"), 0)
    for one in store.summaries.bytes_of_devices(run):
        row = rows.setdefault(one["device"], {"device": one["device"], **nothing})
        row[one["direction"]] += one["bytes"]
        row["envelope_bytes"] += one["envelope_bytes"]
        row[f"{one['direction']}_sent"] += one["sent"]
    return list(rows.values())


def bytes_by_kind(store: Store, run: str) -> list[Row]:
    """Returns the byte counts by kind of part, over all devices and rounds."""
    found = _by_kind(store.summaries.bytes(run, ("kind",), 0, EVERY), ())
    return sorted(found, key=lambda row: str(row["kind"]))


def bytes_by_round_and_kind(store: Store, run: str, first: int, last: int) -> list[Row]:
    """Returns the byte counts of rounds by kind of part, over all devices; round 0 is before the first round."""
    return _by_kind(store.summaries.bytes(run, ("round", "kind"), first, last), ("round",))


def _by_kind(counted: Iterable[Mapping[str, object]], columns: tuple[str, ...]) -> list[Row]:
    rows: dict[tuple[object, ...], Row] = {}
    for one in counted:
        name = {**{column: one[column] for column in columns}, "kind": one["kind"]}
        nothing = dict.fromkeys(("up", "down", "up_sent", "down_sent"), 0)
        row = rows.setdefault(tuple(name.values()), {**name, **nothing})
        row[str(one["direction"])] += one["bytes"]
        row[f"{one['direction']}_sent"] += one["sent"]
    return list(rows.values())
