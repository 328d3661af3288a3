"""How long the engine pauses after rounds that had no result."""

from __future__ import annotations

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 60.0
_DOUBLINGS = 16
"""Upper bound on the exponent; pauses reach `_LONGEST_SECONDS` before it."""


def pause_seconds(failures: int) -> float:
    """Returns the pause after this many consecutive failures, at least 1: 0.1 s, doubled each time, at most 60 s."""
    return float(min(_FIRST_SECONDS * 2.0 ** min(failures - 1, _DOUBLINGS), _LONGEST_SECONDS))
