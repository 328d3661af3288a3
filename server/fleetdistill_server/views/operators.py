"""The content of a backup in words, as the result of an operator's call."""

from __future__ import annotations

from fleetdistill_server.texts import counted, readable_bytes

_WITH = ", with "


def backed_up(payloads: int, size: int, missing: int) -> str:
    """Returns the content of a backup in words, with the number of payloads that the store has lost."""
    found = f"{counted(payloads, 'payload')} and the database, {readable_bytes(size)}"
    return f"{found}{_WITH}{counted(missing, 'payload')} missing" if missing else found


def missing_in(result: str) -> str:
    """Returns the end of a result that says how many payloads are missing; empty for a complete backup."""
    return "".join(result.partition(_WITH)[1:])
