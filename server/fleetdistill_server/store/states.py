"""Values of the `status` and `reason` columns that several modules use."""

from __future__ import annotations

FINISHED = "finished"
OVER = (FINISHED, "cancelled")
"""Statuses of a run that has ended. A finished run can be resumed with more rounds; a cancelled run cannot."""
AT_REST = (*OVER, "stopped")
"""Statuses of a run that no engine works on until it is started again."""
ACTIVE = ("preparing", "running")
"""Statuses of a run that an engine works on, or will as soon as one is free."""
CREATED, PAUSED, STOPPED = "created", "paused", "stopped"
"""Statuses of a run that waits for its operator: not started yet, paused within a round, or stopped between rounds."""
QUEUED, WAITING, IDLE = "queued", "waiting for devices", "idle"
"""What people are shown of an active run that waits: for an engine, for devices, or for a change of its devices."""
DEADLINE_PASSED = "deadline passed"
"""Reason stored for an ask that was not answered before its deadline."""
STALENESS = "staleness"
"""Figure of a round: by device, how many rounds old the ask was that its answer belongs to."""
MOST_STALENESS = 1000
"""Largest age of an ask in rounds, the upper limit of `[run] staleness_limit`."""
