"""What a person or a script sees of a store: plain data first, tables made of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fleetdistill.errors import ConfigurationError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.joining import guard_events, guards_by_round, verdict_rows, verdicts
from fleetdistill_server.store import Row, Store


@dataclass(frozen=True)
class View:
    """Named lists of rows; `facts` stand above the tables.

    Attributes:
        lists: Title to rows of plain values.
        facts: Name to value.
    """

    lists: dict[str, list[Row]]
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """Everything as JSON; a single list as a list."""
        value: Any = {**self.facts, **self.lists}
        if not self.facts and len(self.lists) == 1:
            value = next(iter(self.lists.values()))
        return json.dumps(value, indent=1)

    def tables(self) -> list[Table | str]:
        """Everything as tables."""
        facts = ["\n".join(f"{name}: {value}" for name, value in self.facts.items())] if self.facts else []
        lists = self.lists.items()
        return [*facts, *(_table(title, rows) if rows else f"{title} (0)" for title, rows in lists)]


def runs(store: Store) -> View:
    """All runs."""
    return View({"runs": [_run_row(row) for row in store.runs()]})


def run(store: Store, name: str) -> View:
    """One run: rounds, accuracies, traffic, and everything out of the ordinary.

    Raises:
        ConfigurationError: There is no run of that name.
    """
    found = {row["name"]: row for row in store.runs()}
    if name not in found:
        raise ConfigurationError(f"there is no run {name!r}; the store has {', '.join(found) or 'none'}")
    lists = {
        "rounds": [_round_row(store, row) for row in store.rounds(name)],
        "bytes": _bytes_by_device(store, name),
        "reported_uploads": [_reported_row(row) for row in store.uploads(name) if row["status"] == "reported"],
        "events": [_event_row(row) for row in store.events(name)],
    }
    return View(lists, {**_run_row(found[name]), **_joining_facts(store, name)})


def devices(store: Store, only: str | None) -> View:
    """Devices of all runs, or of one."""
    names = [row["name"] for row in store.runs() if only in (None, row["name"])]
    if only is not None and not names:
        raise ConfigurationError(f"there is no run {only!r}")
    return View({"devices": [_device_row(store, row) for name in names for row in store.devices(name)]})


def _run_row(row: Row) -> Row:
    config = json.loads(row["config"])
    return {
        "run": row["name"],
        "method": config.get("run", {}).get("method", ""),
        "status": row["status"],
        "reason": row["reason"] or "",
        "completed_rounds": row["completed_rounds"],
        "wanted_rounds": config.get("run", {}).get("rounds"),
        "devices": row["devices"],
        "started": _when(row["created_at"]),
    }


def _joining_facts(store: Store, name: str) -> Row:
    """What protected the devices, over the whole run."""
    counted = verdicts(verdict_rows(store, name))
    guards = len(guard_events(store, name))
    return {"guards_fired": guards, "models_replaced": counted.replaced, "models_kept": counted.kept}


def _verdict_cells(store: Store, run: str, column: str, value: Any) -> Row:
    """Verdicts of one round or one device; empty where its apps gave no validation data."""
    rows = [row for row in verdict_rows(store, run) if row[column] == value]
    return asdict(verdicts(rows)) if rows else {"kept": None, "replaced": None}


def _mean_figure(store: Store, row: Row, name: str, split: str) -> float | None:
    """Mean over the devices of what they reported for a round; None if none did."""
    told = [one for one in store.figures(row["run"], name, split) if one["round"] == row["round"] and one["count"]]
    return round(sum(one["sum"] / one["count"] for one in told) / len(told), 4) if told else None


def _round_row(store: Store, row: Row) -> Row:
    figures = json.loads(row["figures"] or "{}")
    seconds = (row["ended_at"] - row["started_at"]) if row["ended_at"] else None
    teacher = figures.get("teacher_accuracy", {})
    return {
        "round": row["round"],
        "status": row["status"] + (f": {row['reason']}" if row["reason"] else ""),
        "cohort": len(json.loads(row["cohort"])),
        "used": row["used"],
        "reported": row["reported"],
        "guards": guards_by_round(store, row["run"])[row["round"]],
        **_verdict_cells(store, row["run"], "round", row["round"]),
        "seconds": round(seconds, 2) if seconds is not None else None,
        "train_loss": _mean_figure(store, row, "loss", "train"),
        "test_accuracy": _mean_figure(store, row, "accuracy", "test"),
        "server_accuracy": round(sum(teacher.values()) / len(teacher), 4) if teacher else None,
        "cut_layers": ", ".join(f"{n} x {cut}" for cut, n in Counter(figures.get("cut_layer", {}).values()).items()),
        "distillation_steps": figures.get("distillation_steps"),
        "effective_devices": round(figures["effective_devices"], 2) if "effective_devices" in figures else None,
        "global_accuracy": round(figures["global_accuracy"], 4) if "global_accuracy" in figures else None,
        "refined": ", ".join(f"{count} {tag}" for tag, count in figures.get("refined_rows", {}).items()),
    }


def _bytes_by_device(store: Store, name: str) -> list[Row]:
    rows: dict[str, Row] = {}
    for one in store.traffic(name):
        row = rows.setdefault(one["device"], {"device": one["device"], "up": 0, "down": 0, "envelope_bytes": 0})
        row[one["direction"]] += one["tensor_bytes"] + one["envelope_bytes"]
        row["envelope_bytes"] += one["envelope_bytes"]
    return list(rows.values())


def _reported_row(row: Row) -> Row:
    return {name: row[name] for name in ("round", "step", "device", "receipt", "reason")}


def _event_row(row: Row) -> Row:
    names = ("round", "device", "kind", "code", "text")
    return {**{name: row[name] for name in names}, "at": _when(row["at"])}


def _device_row(store: Store, row: Row) -> Row:
    profile = contract_pb2.DeviceProfile.FromString(row["profile"])
    scored = [one for one in store.figures(row["run"], "accuracy", "test") if one["device"] == row["device"]]
    return {
        "run": row["run"],
        "device": row["device"],
        "present": bool(row["present"]),
        "model": profile.model_name,
        "parameters": profile.parameters,
        "samples": profile.samples,
        "test_accuracy": round(scored[-1]["sum"] / scored[-1]["count"], 4) if scored else None,
        **_verdict_cells(store, row["run"], "device", row["device"]),
        "sdk": profile.sdk_version,
        "last_seen": _when(row["last_seen"]),
    }


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{title} ({len(rows)})", title_justify="left", box=SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    return table
