"""Views of runs and devices: plain data, and tables made from them."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import GENERAL
from fleetdistill.printable import printable
from fleetdistill.privacy.guarantee import Guarantee
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.heartbeat import NOT_SERVED, Served
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.guards import count_replacements, guards_by_round, replacement_rows
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.expected import Expected, expected, of_the_fleet
from fleetdistill_server.views.suspects import suspects_by_round

UNTIL_STOPPED = "until stopped"
"""Text shown for a run without a number of rounds."""
_FURTHER = "/accuracy"
"""Suffix of the accuracy figures of further variants; the variant's name precedes it."""
MOST_EVENTS = 1000
"""Largest number of events shown for a run; the newest are shown."""
_MOST_ANSWERS = 4
"""Largest number of further variants shown, because devices choose the names of their figures."""


@dataclass(frozen=True)
class View:
    """Named lists of rows, with `facts` shown above the tables.

    Attributes:
        lists: Rows of plain values, by title.
        facts: Values by name.
    """

    lists: dict[str, list[Row]]
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """Returns the view as JSON: an object, or an array if the view consists of a single list."""
        value: Any = {**self.facts, **self.lists}
        if not self.facts and len(self.lists) == 1:
            value = next(iter(self.lists.values()))
        return json.dumps(value, indent=1)

    def tables(self) -> Sequence[Table | Text | str]:
        """Returns the view as tables. Markup is disabled, because devices choose some of the texts."""
        shown = _display_row(self.facts)
        facts = [Text("\n".join(f"{name}: {printable(str(value))}" for name, value in shown.items()))] if shown else []
        lists = {title: [_display_row(row) for row in rows] for title, rows in self.lists.items()}
        return [*facts, *(_table(title, rows) if rows else Text(f"{title} (0)") for title, rows in lists.items())]


def runs(store: Store, served: Served = NOT_SERVED) -> View:
    """Returns a view of all runs; `served` is the run that a server currently works on."""
    return View({"runs": [_run_row(row, served) for row in store.runs.all()]})


def run(store: Store, name: str, served: Served = NOT_SERVED) -> View:
    """Returns a view of one run: its rounds, accuracies, traffic and events.

    Args:
        store: Store that contains the run.
        name: Name of the run.
        served: The run that a server currently works on.

    Raises:
        ConfigurationError: The run does not exist.
    """
    found = {row["name"]: row for row in store.runs.all()}
    if name not in found:
        raise ConfigurationError(no_such_run(name, list(found)))
    reported = _Reported.by("round", store, name)
    guards, expectations = guards_by_round(store, name), expected(store, name)
    suspects = suspects_by_round(store, name)
    traffic = store.history.traffic_by_kind(name)
    sent = _grouped(traffic, "round")
    lists = {
        "rounds": [
            {
                **_round_row(row, guards[row["round"]], reported),
                "suspects": ", ".join(suspects.get(row["round"], ())),
                **_sent_cells(sent.get(row["round"], ())),
            }
            for row in store.runs.rounds(name)
        ],
        **_answers(store, name),
        **_leave_one_out(expectations),
        "bytes": _bytes_by_device(traffic),
        "bytes_by_kind": _bytes_by_kind(traffic),
        "reported_uploads": [_reported_row(row) for row in store.asks.uploads(name) if row["status"] == "reported"],
        "events": [_event_row(row) for row in store.history.newest_events(name, MOST_EVENTS)],
    }
    facts = {
        "events_in_all": store.history.count_events(name),
        "guards_fired": guards.total(),
        **reported.totals(),
        **_expected_of_the_fleet(expectations),
    }
    return View(lists, {**_run_row(found[name], served), **facts, **_privacy(found[name])})


def devices(store: Store, only: str | None) -> View:
    """Returns a view of the devices of one run, or of all runs if `only` is None."""
    names = [row["name"] for row in store.runs.all() if only in (None, row["name"])]
    if only is not None and not names:
        raise ConfigurationError(no_such_run(only, store.runs.names()))
    reported = {name: _Reported.by("device", store, name) for name in names}
    expectations = {name: expected(store, name) for name in names}
    revoked = {row["subject"] for row in store.credentials.revocations()}
    rows = [
        _device_row(row, reported[name], expectations[name], revoked)
        for name in names
        for row in store.devices.all(name)
    ]
    return View({"devices": rows})


def _run_row(row: Row, served: Served) -> Row:
    config = json.loads(row["config"])
    engine = "no server" if row["name"] != served.run else "engine hangs" if served.hangs else ""
    idle = engine if row["status"] in ("preparing", "running") else ""
    return {
        "run": row["name"],
        "method": config.get("run", {}).get("method", ""),
        "status": row["status"] + (f" ({idle})" if idle else ""),
        "reason": row["reason"] or "",
        "completed_rounds": row["completed_rounds"],
        "wanted_rounds": config.get("run", {}).get("rounds") or None,
        "devices": row["devices"],
        "started": when(row["created_at"]),
    }


def _privacy(row: Row) -> Row:
    """Returns the meaning of a private run's epsilon; nothing for other runs."""
    config = json.loads(row["config"])
    return {"privacy": Guarantee(**config["privacy"]).sentence} if "privacy" in config else {}


Groups = Mapping[Any, list[Row]]


@dataclass(frozen=True)
class _Reported:
    """Figures that the devices of a run reported, grouped by round or by device and read once."""

    replacements: Groups
    train_loss: Groups
    test_accuracy: Groups

    @classmethod
    def by(cls, column: str, store: Store, run: str) -> _Reported:
        return cls(
            replacements=_grouped(replacement_rows(store, run), column),
            train_loss=_grouped(store.history.figures(run, "loss", "train"), column),
            test_accuracy=_grouped(store.history.figures(run, "accuracy", "test"), column),
        )

    def totals(self) -> Row:
        """Returns how many app models were replaced and kept in the whole run."""
        counted = count_replacements([row for rows in self.replacements.values() for row in rows])
        return {"models_replaced": counted.replaced, "models_kept": counted.kept}


def _grouped(rows: Iterable[Row], column: str) -> Groups:
    groups = defaultdict[Any, list[Row]](list)
    for row in rows:
        groups[row[column]].append(row)
    return groups


def _replacement_cells(rows: Sequence[Row] | None) -> Row:
    """Returns how many app models one round or device kept and replaced.

    Both numbers are None if no app has validation data.
    """
    return asdict(count_replacements(rows)) if rows else {"kept": None, "replaced": None}


def _mean_figure(rows: Iterable[Row]) -> float | None:
    """Returns the mean over devices of a reported figure; None if no device reported it."""
    rates = [row["sum"] / row["count"] for row in rows if row["count"]]
    return round(sum(rates) / len(rates), 4) if rates else None


def _round_row(row: Row, guards: int, reported: _Reported) -> Row:
    figures = json.loads(row["figures"] or "{}")
    seconds = (row["ended_at"] - row["started_at"]) if row["ended_at"] else None
    teacher = figures.get("teacher_accuracy", {})
    number = row["round"]
    return {
        "round": number,
        "status": row["status"] + (f": {row['reason']}" if row["reason"] else ""),
        "cohort": len(json.loads(row["cohort"])),
        "used": row["used"],
        "reported": row["reported"],
        "guards": guards,
        **_replacement_cells(reported.replacements.get(number)),
        "seconds": round(seconds, 2) if seconds is not None else None,
        "train_loss": _mean_figure(reported.train_loss.get(number, ())),
        "test_accuracy": _mean_figure(reported.test_accuracy.get(number, ())),
        "server_accuracy": round(sum(teacher.values()) / len(teacher), 4) if teacher else None,
        "cut_layers": ", ".join(f"{n} x {cut}" for cut, n in Counter(figures.get("cut_layer", {}).values()).items()),
        "distillation_steps": figures.get("distillation_steps"),
        "effective_devices": round(figures["effective_devices"], 2) if "effective_devices" in figures else None,
        "strength": figures.get("strength"),
        "global_accuracy": round(figures["global_accuracy"], 4) if "global_accuracy" in figures else None,
        "refined": ", ".join(f"{count} {tag}" for tag, count in figures.get("refined_rows", {}).items()),
    }


def _answers(store: Store, run: str) -> dict[str, list[Row]]:
    """Returns each device's newest test accuracy by variant, if devices report several variants.

    The method defines the names of the further variants.
    """
    reported = _grouped(store.history.newest_figures(run, "accuracy", "test"), "name")
    taken = (GENERAL + _FURTHER, "device" + _FURTHER)  # names of other columns
    further = [name for name in reported if name != "accuracy" and name not in taken]
    if not further:
        return {}
    # Variants reported by the most devices come first.
    usual = sorted(further, key=lambda name: -len(reported[name]))[:_MOST_ANSWERS]
    named = {name.removesuffix(_FURTHER): reported[name] for name in sorted(usual)}
    answers = {GENERAL: reported.get("accuracy", []), **named}
    rows: dict[str, Row] = {}
    for answer, newest in answers.items():
        for one in newest:
            row = rows.setdefault(one["device"], {"device": one["device"], **dict.fromkeys(answers)})
            row[answer] = _mean_figure([one])
    return {"test_accuracy_of_answers": [rows[device] for device in sorted(rows)]}


def _leave_one_out(expectations: Mapping[str, Expected]) -> dict[str, list[Row]]:
    """Returns each device's expected accuracy on unseen data like its own, if devices report it."""
    rows = [
        {
            "device": device,
            **{answer: round(rate, 4) for answer, rate in one.rates.items()},
            "own_statistics_kept": one.own_statistics_kept,
        }
        for device, one in expectations.items()
    ]
    return {"leave_one_out": rows} if rows else {}


def _expected_of_the_fleet(expectations: Mapping[str, Expected]) -> Row:
    """Returns the expected accuracy over the samples of all devices."""
    rates = of_the_fleet(expectations.values()) or {}
    return {f"leave_one_out_{answer}": round(rate, 4) for answer, rate in rates.items()}


def _bytes_by_device(traffic: Sequence[Row]) -> list[Row]:
    """Returns per device: uncompressed bytes of tensors and headers, header bytes, and bytes on the link."""
    rows: dict[str, Row] = {}
    nothing = dict.fromkeys(("up", "down", "envelope_bytes", "up_sent", "down_sent"), 0)
    for one in traffic:
        row = rows.setdefault(one["device"], {"device": one["device"], **nothing})
        row[one["direction"]] += one["tensor_bytes"] + one["envelope_bytes"]
        row["envelope_bytes"] += one["envelope_bytes"]
        row[f"{one['direction']}_sent"] += one["sent_bytes"]
    return list(rows.values())


def _bytes_by_kind(traffic: Sequence[Row]) -> list[Row]:
    """Returns the byte counts by kind of part, over all devices and rounds."""
    rows: dict[str, Row] = {}
    for one in sorted(traffic, key=lambda row: str(row["kind"])):
        kind = one["kind"] or "not recorded"
        row = rows.setdefault(kind, {"kind": kind, **dict.fromkeys(("up", "down", "up_sent", "down_sent"), 0)})
        row[one["direction"]] += one["tensor_bytes"] + one["envelope_bytes"]
        row[f"{one['direction']}_sent"] += one["sent_bytes"]
    return list(rows.values())


def _sent_cells(traffic: Iterable[Row]) -> Row:
    """Returns the bytes on the link in one round, over all devices."""
    cells = {"bytes_up": 0, "bytes_down": 0}
    for one in traffic:
        cells[f"bytes_{one['direction']}"] += one["sent_bytes"]
    return cells


def _reported_row(row: Row) -> Row:
    return {name: row[name] for name in ("round", "step", "device", "receipt", "reason")}


def _event_row(row: Row) -> Row:
    names = ("round", "device", "kind", "code", "text")
    return {**{name: row[name] for name in names}, "at": when(row["at"])}


def _device_row(row: Row, reported: _Reported, expectations: Mapping[str, Expected], revoked: set[str]) -> Row:
    profile = contract_pb2.DeviceProfile.FromString(row["profile"])
    expectation = expectations.get(row["device"])
    scored = reported.test_accuracy.get(row["device"], [])
    return {
        "run": row["run"],
        "device": row["device"],
        "present": bool(row["present"]),
        "revoked": f"{Role.DEVICE}:{row['device']}" in revoked,
        "forgotten": _forgotten(row),
        "model": profile.model_name,
        "parameters": profile.parameters,
        "samples": profile.samples,
        "test_accuracy": _mean_figure(scored[-1:]),
        "leave_one_out": round(expectation.rates["general"], 4) if expectation is not None else None,
        **_replacement_cells(reported.replacements.get(row["device"])),
        "sdk": profile.sdk_version,
        "last_seen": when(row["last_seen"]),
    }


def _forgotten(row: Row) -> str | None:
    """Returns when a device was forgotten, "asked" while the request is pending, or None without a request."""
    if row["forgotten_at"] is not None:
        return when(row["forgotten_at"])
    return "asked" if row["forget_asked_at"] is not None else None


def when(seconds: float) -> str:
    """Formats Unix time in seconds as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _display_row(row: Row) -> Row:
    """Replaces values of None with text for display in a table."""
    return {**row, "wanted_rounds": UNTIL_STOPPED} if row.get("wanted_rounds", 0) is None else row


_HEADINGS = {"cohort": "devices asked", "used": "answers used", "reported": "answers not used"}
"""Table headings for columns whose names, which scripts read, are too terse."""


def heading(name: str) -> str:
    """Returns the table heading of a column."""
    return _HEADINGS.get(name, name.replace("_", " "))


def _table(title: str, rows: Sequence[Row]) -> Table:
    """Builds a table from rows with equal keys; columns that are empty in all rows are omitted."""
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    table = Table(title=Text(f"{title} ({len(rows)})"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(Text(printable(heading(name))), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if row[name] is None else printable(str(row[name]))) for name in names))
    return table
