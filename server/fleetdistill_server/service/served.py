"""What the server of a store works on, and the states of runs that people are shown because of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleetdistill_server.service.process_state import ENGINE, last_processes
from fleetdistill_server.service.serve_lock import Serving, serving
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING
from fleetdistill_server.store.store import Store

__all__ = ["placed", "state_of"]


@dataclass(frozen=True)
class Served:
    """The runs that a server works on.

    Attributes:
        runs: Runs that have an engine.
        queued: Runs that wait only for an engine, in order.
        waiting: Runs that wait for devices, a change of them, or the time of the next round, without an engine.
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
    result = placed(directory, store)
    if not result.runs:
        return result
    hanging = {process.run for process in last_processes(directory) if process.name == ENGINE and process.hangs}
    return replace(result, hanging=result.runs & hanging)


def placed(directory: Path, store: Store) -> Served:
    """Returns which runs have engines and which are queued, without a look at the engines."""
    served_now = serving(directory)
    if served_now is None:
        return NOT_SERVED
    queue = queue_of(served_now, store)
    names = list(queue)
    later = names[served_now.engines :]
    queued = tuple(run for run in later if not queue[run])
    waiting = frozenset(run for run in later if queue[run])
    return Served(frozenset(names[: served_now.engines]), queued, waiting)


def may_be_present(directory: Path, store: Store) -> bool:
    """Returns whether devices can be present: not without a server, which a remote database may have elsewhere."""
    return serving(directory) is not None or store.database.is_remote


def queue_of(found: Serving, store: Store) -> dict[str, bool]:
    """Returns the runs that a server works on, or will, in order, each with whether it waits, and not for an engine."""
    if not found.run:
        now = store.database.now()
        return {
            run.name: run.waits_for is not None or (run.waits_until or 0.0) > now for run in store.run_control.queue()
        }
    # The server of the engine's machine registers the only run.
    status = store.runs.status(found.run)
    return {found.run: False} if status is None or status in ACTIVE else {}


def state_of(run: Run, served: Served) -> str:
    """Returns the state that people are shown of a run: its status, or what an active one waits for.

    Args:
        run: The run.
        served: What its server works on.
    """
    if run.status not in ACTIVE:
        return run.status
    if run.waits_for is not None:
        return WAITING if run.waits_for else IDLE
    if run.name in served.queued:
        return QUEUED
    return run.status if run.waits_until is None else IDLE
