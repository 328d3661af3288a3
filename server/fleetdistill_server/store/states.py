"""States of a run and the reason of a late ask, as they stand in the tables."""

from __future__ import annotations

OVER = ("finished", "cancelled")
"""States of a run that is over, for its devices and for good, unless a finished one is given more rounds."""
AT_REST = (*OVER, "stopped")
"""States of a run that no engine works on; a stopped one goes on with the next start."""
DEADLINE_PASSED = "deadline passed"
"""Reason of an ask that nobody answered in time."""
