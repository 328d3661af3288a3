"""Error message for an unknown run name."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.names import did_you_mean

_MAX_NAMES = 20


def no_such_run(run: str, known: Sequence[str]) -> str:
    """Returns the error message for a run that does not exist, with the closest name and the store's runs.

    Args:
        run: Name that was not found.
        known: Names of the store's runs, oldest first. At most the newest 20 are listed.
    """
    more = f"{len(known) - _MAX_NAMES} others and " if len(known) > _MAX_NAMES else ""
    there = more + (", ".join(known[-_MAX_NAMES:]) or "none")
    meant = did_you_mean(run, known)
    return f"there is no run {run!r}{f'{meant} Runs' if meant else '; runs'} in the store: {there}"
