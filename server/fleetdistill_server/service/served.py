"""What the server of a store works on, and the states of runs that people are shown because of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleetdistill_server.service.process_state import ENGINE, last_processes
from fleetdistill_server.service.serve_lock import Serving, serving
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class Served:
    """The runs that a server works on.

    Attributes:
        runs: Runs that have an engine.
        queued: Runs that wait only for an engine, in order.
        waiting: Runs that wait for devices, or for a change of them, without an engine.
        hanging: Runs whose engine hangs.
    """

    runs: frozenset[str] = frozenset()
    queued: tuple[str, ...] = ()
    waiting: frozenset[str] = frozenset()
    hanging: frozenset[str] = frozenset()

    def includes(self, run: str) -> bool:
        """Returns whether the server works on an active run, or will."""
        return run in self.runs or run in self.queued or run in self.waiting


NOT_SERVED = Served()
"""The state of a store that no server is serving."""


def served(directory: Path, store: Store) -> Served:
    """Returns what a store's server works on."""
    found = placed(directory, store)
    if not found.runs:
        return found
    hanging = {one.run for one in last_processes(directory) if one.name == ENGINE and one.hangs}
    return replace(found, hanging=found.runs & hanging)


def placed(directory: Path, store: Store) -> Served:
    """Returns which runs have engines and which are queued, without a look at the engines."""
    found = serving(directory)
    if found is None:
        return NOT_SERVED
    queue = queue_of(found, store)
    later = queue[found.engines :]
    queued = tuple(row["name"] for row in later if row["waits_for"] is None)
    waiting = frozenset(row["name"] for row in later if row["waits_for"] is not None)
    return Served(frozenset(row["name"] for row in queue[: found.engines]), queued, waiting)


def may_be_present(directory: Path, store: Store) -> bool:
    """Returns whether devices can be present: not without a server, which a remote database may have elsewhere."""
    return serving(directory) is not None or store.database.is_remote


def queue_of(found: Serving, store: Store) -> list[Row]:
    """Returns the runs that a server works on, or will, in order, as `LedRuns.queue`."""
    if not found.run:
        return store.led.queue()
    # The server of the engine's machine registers the only run.
    status = (store.runs.get(found.run) or {}).get("status", ACTIVE[0])
    return [{"name": found.run, "waits_for": None}] if status in ACTIVE else []


def state_of(row: Row, served: Served) -> str:
    """Returns the state that people are shown of a run: its status, or what an active one waits for.

    Args:
        row: The run's name, status and `waits_for`.
        served: What its server works on.
    """
    if row["status"] not in ACTIVE:
        return str(row["status"])
    if row["waits_for"] is not None:
        return WAITING if row["waits_for"] else IDLE
    return QUEUED if row["name"] in served.queued else str(row["status"])
