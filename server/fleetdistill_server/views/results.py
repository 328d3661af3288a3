"""Results of operators' calls in words: what was deleted or rolled back, and what a backup has."""

from __future__ import annotations

from fleetdistill_server.store.retention import Freed, Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.texts import counted, readable_bytes

__all__ = ["deleted", "left_for_later", "missing_in", "pruned", "rolled_back"]

_WITH = ", with "


def deleted(run: str, gone: Pruned | None) -> str:
    """Returns sentences on a deleted run; None if it was deleted before."""
    if gone is None:
        return f"there is no run {run!r}; nothing to delete"
    rows = f"{counted(gone.rounds, 'round')}, {counted(gone.events, 'event')}, {counted(gone.figures, 'figure')}"
    later = left_for_later(gone.later)
    return f"run {run!r} is deleted: {rows}, {payloads(gone.freed)}" + (f"\n{later}" if later else "")


def rolled_back(run: str, to: int, done: RolledBack) -> str:
    """Returns a sentence on a run that was rolled back to the state after a round."""
    undone, left = counted(done.undone, "round"), counted(done.completed_rounds, "completed round")
    return f"run {run!r} is rolled back to round {to}: {undone} undone, {left} left; start or serve it to continue"


def pruned(gone: Pruned) -> str:
    """Returns what was deleted of old rounds."""
    rows = f"{counted(gone.rounds, 'round')} with {counted(gone.events, 'event')}, {counted(gone.figures, 'figure')}"
    return f"{rows}, {payloads(gone.freed)}"


def payloads(freed: Freed) -> str:
    """Returns the number and size of deleted payloads."""
    return f"{counted(freed.payloads, 'payload')} ({readable_bytes(freed.bytes)})"


def left_for_later(later: Freed) -> str:
    """Returns a sentence on the payloads that are too new to delete while a server runs, or an empty string."""
    age = "is" if later.payloads == 1 else "are"
    return f"{payloads(later)} {age} less than an hour old; the server deletes them later" if later.payloads else ""


def backed_up(payloads: int, size: int, missing: int) -> str:
    """Returns the content of a backup in words, with the number of payloads that the store has lost."""
    result = f"{counted(payloads, 'payload')} and the database, {readable_bytes(size)}"
    return f"{result}{_WITH}{counted(missing, 'payload')} missing" if missing else result


def missing_in(result: str) -> str:
    """Returns the end of a result that says how many payloads are missing; empty for a complete backup."""
    return "".join(result.partition(_WITH)[1:])
