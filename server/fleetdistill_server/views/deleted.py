"""What `fleetdistill runs delete` and `prune` print."""

from __future__ import annotations

from fleetdistill_server.store.retention import Freed, Pruned
from fleetdistill_server.views.units import counted, readable_bytes

NOTHING = "nothing to delete"
"""End of the sentence on a run that does not exist, also as the result of an operator's call."""


def deleted(run: str, gone: Pruned | None) -> str:
    """Returns sentences on a deleted run; None if there was no such run."""
    if gone is None:
        return f"there is no run {run!r}; {NOTHING}"
    rows = f"{counted(gone.rounds, 'round')}, {counted(gone.events, 'event')}, {counted(gone.figures, 'figure')}"
    later = left_for_later(gone.later)
    return f"run {run!r} is deleted: {rows}, {payloads(gone.freed)}" + (f"\n{later}" if later else "")


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
