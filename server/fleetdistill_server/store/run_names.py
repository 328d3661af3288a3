"""The sentence about a run that is not there."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.names import did_you_mean

_MOST_NAMES = 20


def no_such_run(run: str, known: Sequence[str]) -> str:
    """That a store has no such run, which one may be meant, and which runs it has, the newest last.

    Args:
        run: The name.
        known: Names of the store's runs, oldest first.
    """
    more = f"{len(known) - _MOST_NAMES} others and " if len(known) > _MOST_NAMES else ""
    there = more + (", ".join(known[-_MOST_NAMES:]) or "none")
    meant = did_you_mean(run, known)
    return f"there is no run {run!r}{f'{meant} The' if meant else '; the'} store has {there}"
