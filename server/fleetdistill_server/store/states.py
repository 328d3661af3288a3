"""Statuses of runs, rounds, asks and answers, and other values that several modules use."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


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


OVER = (RunStatus.FINISHED, RunStatus.CANCELLED)
"""Statuses of a run that has ended. A finished run can be resumed with more rounds; a cancelled run cannot."""
AT_REST = (*OVER, RunStatus.STOPPED)
"""Statuses of a run that no engine works on until it is started again."""
ACTIVE = (RunStatus.PREPARING, RunStatus.RUNNING)
"""Statuses of a run that an engine works on, or will as soon as one is free."""
JOINABLE = (*ACTIVE, RunStatus.PAUSED)
"""Statuses of the runs that devices without a run's name can join."""
QUEUED, WAITING, IDLE = "queued", "waiting for devices", "idle"
"""What people are shown of an active run that waits: for an engine, for devices, or for a change of its devices."""
DEADLINE_PASSED = "deadline passed"
"""Reason stored for an ask that was not answered before its deadline."""
STALENESS = "staleness"
"""Figure of a round: by device, how many rounds old the ask was that its answer belongs to."""
MOST_STALENESS = 1000
"""Largest age of an ask in rounds, the upper limit of `[run] staleness_limit`."""


def sql_list(statuses: Iterable[str]) -> str:
    """Returns statuses as the list of an SQL condition `status IN (...)`."""
    return ", ".join(f"'{status}'" for status in statuses)
