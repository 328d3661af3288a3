"""Statuses of runs, rounds, asks and answers, and other values that several modules use."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from fleetdistill.errors import RunError
from fleetdistill_server.store.database import Database

__all__ = [
    "ACTIVE",
    "DEADLINE_PASSED",
    "IDLE",
    "OVER",
    "QUEUED",
    "WAITING",
    "AskStatus",
    "RoundStatus",
    "RunStatus",
    "UploadStatus",
]


class RunStatus(StrEnum):
    """What a run does."""

    CREATED = "created"
    PREPARING = "preparing"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class RoundStatus(StrEnum):
    """Whether a round is open, completed, short of answers, or undone by a rollback."""

    OPEN = "open"
    CLOSED = "closed"
    SHORT = "short"
    UNDONE = "undone"


class AskStatus(StrEnum):
    """Whether an ask waits for its answer."""

    OPEN = "open"
    ANSWERED = "answered"
    OUT = "out"


class UploadStatus(StrEnum):
    """What became of an accepted answer: not used yet, in a result, or reported as in none."""

    ACKNOWLEDGED = "acknowledged"
    USED = "used"
    REPORTED = "reported"


TRANSITIONS: dict[type[StrEnum], dict[StrEnum, tuple[StrEnum, ...]]] = {
    RunStatus: {
        RunStatus.CREATED: (RunStatus.PREPARING, RunStatus.STOPPED, RunStatus.CANCELLED),
        RunStatus.PREPARING: (
            *(RunStatus.RUNNING, RunStatus.PAUSED, RunStatus.STOPPED, RunStatus.FINISHED, RunStatus.CANCELLED),
        ),
        RunStatus.RUNNING: (
            *(RunStatus.PREPARING, RunStatus.PAUSED, RunStatus.STOPPED, RunStatus.FINISHED, RunStatus.CANCELLED),
        ),
        RunStatus.PAUSED: (RunStatus.PREPARING, RunStatus.RUNNING, RunStatus.STOPPED, RunStatus.CANCELLED),
        RunStatus.STOPPED: (RunStatus.PREPARING, RunStatus.RUNNING, RunStatus.CANCELLED),
        RunStatus.FINISHED: (RunStatus.PREPARING, RunStatus.RUNNING, RunStatus.STOPPED),
        RunStatus.CANCELLED: (),
    },
    RoundStatus: {
        RoundStatus.OPEN: (RoundStatus.CLOSED, RoundStatus.SHORT),
        RoundStatus.CLOSED: (RoundStatus.UNDONE,),
        RoundStatus.SHORT: (),
        RoundStatus.UNDONE: (),
    },
    AskStatus: {
        AskStatus.OPEN: (AskStatus.ANSWERED, AskStatus.OUT),
        AskStatus.ANSWERED: (AskStatus.OPEN, AskStatus.OUT),
        AskStatus.OUT: (),
    },
}
"""The statuses that may follow each status of a run, a round and an ask; docs/explanation/architecture.md lists them.

A finished run is started again with more rounds, or rolled back. An answer whose payload is lost is asked for again.
"""
OVER = (RunStatus.FINISHED, RunStatus.CANCELLED)
"""Statuses of a run that has ended. A finished run can be resumed with more rounds; a cancelled run cannot."""
AT_REST = (*OVER, RunStatus.STOPPED)
"""Statuses of a run that no engine works on until it is started again."""
ACTIVE = (RunStatus.PREPARING, RunStatus.RUNNING)
"""Statuses of a run that an engine works on, or will as soon as one is free."""
JOINABLE = (*ACTIVE, RunStatus.PAUSED)
"""Statuses of the runs that devices without a run's name can join."""
QUEUED, WAITING, IDLE = "queued", "waiting for devices", "idle"
"""What people are shown of an active run that waits: for an engine, for devices, or for a change or its next round."""
DEADLINE_PASSED = "deadline passed"
"""Reason stored for an ask that was not answered before its deadline."""
NO_SPACE = "refused: no space on the disk"
"""Reason stored for an ask whose answer was refused for want of disk space; it stays if the deadline passes so."""
STALENESS = "staleness"
"""Figure of a round: by device, how many rounds old the ask was that its answer belongs to."""
MAX_STALENESS = 1000
"""Largest age of an ask in rounds, the upper limit of `[run] staleness_limit`."""


def check_transition(what: str, status: StrEnum, following: StrEnum) -> None:
    """Checks a change of status; a status may be set again, with another reason.

    Raises:
        RunError: `TRANSITIONS` does not allow it.
    """
    allowed = TRANSITIONS[type(status)][status]
    if following not in (status, *allowed):
        raise RunError(f"{what} is {status} and cannot become {following}, only {', '.join(allowed) or 'nothing else'}")


def check_run_change(database: Database, name: str, following: RunStatus) -> None:
    """Checks a change of a run's status, in the caller's transaction. Raises RunError as `check_transition`."""
    status = database.value("SELECT status FROM runs WHERE name = ?", name)
    if status is not None:
        check_transition(f"run {name!r}", RunStatus(status), following)


def sql_list(statuses: Iterable[str]) -> str:
    """Returns statuses as the list of an SQL condition `status IN (...)`."""
    return ", ".join(f"'{status}'" for status in statuses)
