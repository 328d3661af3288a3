"""Everything that people can read of a store, by name, for the command line, the dashboard and the front."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill.version import VERSION
from fleetdistill_server.security.tokens import load_enrol_port
from fleetdistill_server.service.serve_lock import SERVED_FILE, last_served, serving
from fleetdistill_server.service.served import may_be_present, served
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import when
from fleetdistill_server.views import fleet, health, overview, runs, server
from fleetdistill_server.views.runs import View

__all__ = ["Query"]

MAX_EVENTS = 1000
"""Largest number of events in a page."""


@dataclass(frozen=True)
class Query:
    """What to read. Fields that a view does not use are ignored.

    Attributes:
        view: Name of the view, a key of `VIEWS` or `FOR_OPERATORS`.
        run: Name of the run; empty for all, where the view has no run.
        device: Id of a device; empty for all.
        after: Only rounds after this one.
        round: Number of a round; None for the open one, or the newest.
        before: Only events whose id is smaller than this; None for all.
        kind: Only events of this kind, or calls of this method; empty for all.
        text: Only events or calls whose text, code or device contains this, in any case.
        most: Largest number of events, 1 to 1,000.
    """

    view: str
    run: str = ""
    device: str = ""
    after: int = -1
    round: int | None = None
    before: int | None = None
    kind: str = ""
    text: str = ""
    most: int = 200


def read(store: Store, directory: Path, query: Query) -> View:
    """Reads a view of the store in a directory.

    Raises:
        ConfigurationError: The view, the run or the device does not exist, or `most` is out of range.
        StoreError: The store could not be read.
    """
    views = {**VIEWS, **FOR_OPERATORS}
    if query.view not in views:
        raise ConfigurationError(f"there is no view {query.view[:64]!r}; there are: {', '.join(views)}")
    if not 1 <= query.most <= MAX_EVENTS:
        raise ConfigurationError(f"most is {query.most}, must be 1 to {MAX_EVENTS}")
    return views[query.view](store, directory, query)


def _about(store: Store, directory: Path, query: Query) -> View:
    try:
        section = tomllib.loads((directory / SERVED_FILE).read_text(encoding="utf-8")).get("server", {})
    except (OSError, ValueError):
        section = {}  # no server has started with this store
    facts = {
        "listen": section.get("listen", ""),
        "tls": bool(section.get("pki")),
        "enrol_port": load_enrol_port(directory),
    }
    served_now = serving(directory)
    return View({}, {"version": VERSION, **facts, "served_run": None if served_now is None else served_now.run})


def _devices(store: Store, directory: Path, query: Query) -> View:
    result = runs.devices(store, query.run or None, served=may_be_present(directory, store))
    started = last_served(directory)
    forgotten = set() if started is None else server.devices_of_forgotten_ca(started.server, store)
    for row in result.lists["devices"]:
        row["certificate"] = server.OF_FORGOTTEN_CA if row["device"] in forgotten else ""
    return result


def _run(store: Store, directory: Path, query: Query) -> View:
    view = runs.run(store, query.run, served(directory, store), present=may_be_present(directory, store))
    view.facts["settings_not_in_use"] = overview.not_in_use(store, directory, query.run)
    return view


def _events(store: Store, directory: Path, query: Query) -> View:
    wanted = {"kind": query.kind, "device": query.device, "text": query.text, "most": query.most}
    return overview.events(store, query.run, before=query.before, **wanted)  # type: ignore[arg-type]


def _operators(store: Store, directory: Path, query: Query) -> View:
    calls = store.operator_calls.newest(before=query.before, call=query.kind, text=query.text, most=query.most + 1)
    names = ("id", "role", "name", "call", "arguments", "address", "result")
    rows = [{**{name: getattr(call, name) for name in names}, "at": when(call.at)} for call in calls[: query.most]]
    return View({"operators": rows}, {"more": len(calls) > query.most})


ViewReader = Callable[[Store, Path, Query], View]
FOR_OPERATORS: Mapping[str, ViewReader] = {"operators": _operators}
"""Functions that read the views that only operators may read, by name."""
VIEWS: Mapping[str, ViewReader] = {
    "health": lambda store, directory, query: View(
        {}, {"problems": health.problems(store, directory), "failed_runs": health.failed_runs(store)}
    ),
    "server": lambda store, directory, query: server.server(store, directory),
    "about": _about,
    "runs": lambda store, directory, query: runs.runs(
        store, served(directory, store), present=may_be_present(directory, store)
    ),
    "run": _run,
    "devices": _devices,
    "overview": lambda store, directory, query: overview.overview(
        store, served(directory, store), present=may_be_present(directory, store)
    ),
    "rounds": lambda store, directory, query: overview.rounds(store, query.run, query.after),
    "traffic": lambda store, directory, query: overview.traffic(store, query.run, query.after),
    "events": _events,
    "participants": lambda store, directory, query: fleet.participants(
        store, query.run, served=may_be_present(directory, store)
    ),
    "device": lambda store, directory, query: fleet.device(
        store, query.run, query.device, served=may_be_present(directory, store)
    ),
    "classes": lambda store, directory, query: fleet.classes(store, query.run),
    "round": lambda store, directory, query: fleet.round_progress(store, query.run, query.round),
    "settings": lambda store, directory, query: overview.settings(store, directory, query.run),
}
"""Functions that read the views, by name."""
