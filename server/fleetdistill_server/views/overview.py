"""A store's runs at a glance, a run's settings, and pages of its events."""

from __future__ import annotations

from fleetdistill_server.service.served import NOT_SERVED, Served
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.views import figures
from fleetdistill_server.views.runs import View, contract_of, event_row, run_row

RECENT = 5
"""Number of the newest closed rounds whose mean duration is used for the time left."""


def overview(store: Store, served: Served = NOT_SERVED, *, present: bool = True) -> View:
    """Returns all runs with present devices, last accuracy, bytes on the link, and the time left, oldest first.

    Args:
        store: The store.
        served: What a server currently works on.
        present: Whether devices can be present, as `may_be_present`.
    """
    devices = store.devices.counts()
    return View(
        {
            "runs": [
                {**run_row(run, devices.get(run.name, 0), served), **_glance(store, run, present)}
                for run in store.runs.all()
            ]
        }
    )


def _glance(store: Store, run: Run, present: bool) -> Row:
    newest = figures.rounds(store, run.name, max(store.summaries.last_round(run.name) - 4 * RECENT, 0))
    lasting = [one["seconds"] for one in newest if one["status"] == RoundStatus.CLOSED][-RECENT:]
    mean = sum(lasting) / len(lasting) if lasting else None
    left = None if mean is None or run.max_rounds is None else mean * max(run.max_rounds - run.completed_rounds, 0)
    sent = {one["direction"]: one["sent"] for one in store.summaries.bytes(run.name, ("run",), 0, EVERY)}
    return {
        "present": len(store.devices.present(run.name)) if present else 0,
        "round_seconds": None if mean is None else round(mean, 2),
        "seconds_left": None if left is None else round(left, 1),
        **{name: _last(newest, name) for name in ("test_accuracy", "server_accuracy", "global_accuracy")},
        "bytes_up": sent.get("up", 0),
        "bytes_down": sent.get("down", 0),
    }


def _last(rounds: list[Row], name: str) -> float | None:
    known = [row[name] for row in rounds if row[name] is not None]
    return known[-1] if known else None


def round_figures(store: Store, run: str, after: int) -> View:
    """Returns the figures of the rounds after a round, with their times in seconds since 1970."""
    store.runs.existing(run)
    times = store.summaries.times_of_rounds(run, after)
    rows = [row for row in figures.rounds(store, run, after + 1) if row["round"] in times]
    for row in rows:
        row["started_at"], row["ended_at"] = times[row["round"]]
    return View({"rounds": rows})


def traffic(store: Store, run: str, after: int) -> View:
    """Returns the bytes by round and kind of part of the rounds after a round; round 0 is before the first round."""
    store.runs.existing(run)
    return View({"bytes": figures.bytes_by_round_and_kind(store, run, after + 1, EVERY)})


def events(store: Store, run: str, *, before: int | None, kind: str, device: str, text: str, most: int) -> View:
    """Returns a page of events, newest first, and the numbers of all events of the run by kind."""
    store.runs.existing(run)
    found = store.summaries.events(run, before=before, kind=kind, device=device, text=text, most=most + 1)
    rows = [{"id": event.id, **event_row(event)} for event in found[:most]]
    kinds = {row["kind"]: row["count"] for row in store.summaries.event_kinds(run)}
    return View({"events": rows}, {"more": len(found) > most, "kinds": kinds})


def settings(store: Store, run: str) -> View:
    """Returns a run's settings by section, and what its contract requires of devices."""
    shown = store.runs.existing(run)
    contract = contract_of(shown)
    needs = {
        "classes": list(contract.classes),
        "input_shape": list(contract.input_shape),
        "columns": list(contract.requirements.columns),
    }
    return View({}, {"run": run, "settings": shown.config, "contract": needs})
