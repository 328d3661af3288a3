"""A store's runs at a glance, a run's settings, and pages of its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from fleetdistill_server.config.run_changes import changes_between, describe_changes
from fleetdistill_server.config.server_config import OF_A_RUN
from fleetdistill_server.service.engine_files import engine_settings
from fleetdistill_server.service.registration import is_of_a_run
from fleetdistill_server.service.served import NOT_SERVED, Served
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.run_figures import round_figures
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.texts import round_or_none
from fleetdistill_server.views.runs import (
    TableRow,
    View,
    bytes_by,
    contract_of,
    event_row,
    round_rows,
    run_row,
    secure_sum_rows,
)

__all__ = ["RECENT"]

RECENT = 5
"""Number of the newest closed rounds whose mean duration is used for the time left."""


def overview(store: Store, served: Served = NOT_SERVED, *, present: bool = True) -> View:
    """Returns all runs with present devices, last accuracy, bytes on the link, and the time left, oldest first.

    Args:
        store: The store.
        served: What a server currently works on.
        present: Whether devices can be present, as `may_be_present`.
    """
    rows = [{**run_row(store, run, served, present=present), **_glance(store, run)} for run in store.runs.all()]
    return View({"runs": rows})


def _glance(store: Store, run: Run) -> TableRow:
    newest = round_figures(store.database, run.name, max(store.summaries.last_round(run.name) - 4 * RECENT, 0))
    lasting = [item.round.seconds or 0.0 for item in newest if item.round.status is RoundStatus.CLOSED][-RECENT:]
    mean = sum(lasting) / len(lasting) if lasting else None
    left = None if mean is None or run.max_rounds is None else mean * max(run.max_rounds - run.completed_rounds, 0)
    sent = next(iter(store.summaries.bytes(run.name, ("run",), 0, EVERY)), {})
    rates = [name for name, figure in run.figures.items() if figure.unit == "accuracy"]
    return {
        "round_seconds": round_or_none(mean, 2),
        "seconds_left": round_or_none(left, 1),
        "test_accuracy": _last(item.test_accuracy for item in newest),
        "method_accuracies": {run.figures[name].label: _last(item.method[name] for item in newest) for name in rates},
        "global_accuracy": _last(item.global_accuracy for item in newest),
        "bytes_up": sent.get("up_sent", 0),
        "bytes_down": sent.get("down_sent", 0),
    }


def _last(values: Iterable[float | str | None]) -> float | str | None:
    return round_or_none(next((value for value in reversed(list(values)) if value is not None), None), 4)


def rounds(store: Store, run: str, after: int) -> View:
    """Returns the figures of the rounds after a round, with their times in seconds since 1970 and their secure sums."""
    shown = store.runs.existing(run)
    figures = round_figures(store.database, run, after + 1)
    rows = round_rows(store, shown, figures)
    more = [
        {
            "started_at": figure.round.started_at,
            "ended_at": figure.round.ended_at,
            "secure_sums": secure_sum_rows(store, run, figure),
        }
        for figure in figures
    ]
    return View({"rounds": [{**row, **one} for row, one in zip(rows, more, strict=True)]})


def traffic(store: Store, run: str, after: int) -> View:
    """Returns the bytes by round and kind of part of the rounds after a round; round 0 is before the first round."""
    store.runs.existing(run)
    return View({"bytes": bytes_by(store, run, ("round", "kind"), after + 1)})


def events(store: Store, run: str, *, before: int | None, kind: str, device: str, text: str, most: int) -> View:
    """Returns a page of events, newest first, and the numbers of all events of the run by kind."""
    store.runs.existing(run)
    events = store.summaries.events(run, before=before, kind=kind, device=device, text=text, most=most + 1)
    rows = [{"id": event.id, **event_row(event)} for event in events[:most]]
    kinds = store.summaries.event_kinds(run)
    return View({"events": rows}, {"more": len(events) > most, "kinds": kinds})


def not_in_use(store: Store, directory: Path, run: str) -> str:
    """Returns in words the changes of a run's settings that its engine reads only when it starts again."""
    used = engine_settings(directory, run) if store.runs.existing(run).engine is not None else None
    if used is None:
        return ""
    changes = changes_between(used, store.run_control.setup(run) or {})
    return describe_changes({name: both for name, both in changes.items() if is_of_a_run(name)})


def settings(store: Store, directory: Path, run: str) -> View:
    """Returns a run's settings by section, what its contract requires of devices, and its method's figures."""
    shown = store.runs.existing(run)
    contract = contract_of(shown)
    needs = {
        "classes": list(contract.classes),
        "input_shape": list(contract.input_shape),
        "columns": list(contract.requirements.columns),
    }
    figures = {name: asdict(figure) for name, figure in shown.figures.items()}
    whole = {section: values for section, values in (store.run_control.setup(run) or {}).items() if section != "limits"}
    if "server" in whole:
        whole["server"] = {name: whole["server"][name] for name in OF_A_RUN}
    waiting = not_in_use(store, directory, run)
    facts = {"settings": {**shown.config, **whole}, "not_in_use": waiting, "contract": needs, "figures": figures}
    return View({}, {"run": run, **facts})
