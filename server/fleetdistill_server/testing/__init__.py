"""Helpers for your own tests: rounds of a server half without a store, and a whole server without a network.

`FakeCohort` is the cohort of one round, with device halves or scripted answers as members. `play` runs whole rounds.
`MemoryServer` serves a run to devices in the test's process; `fleetdistill.testing` provides scripted faults
and a manual clock for such tests. No other package imports `fleetdistill_server.testing`.
"""

from __future__ import annotations

from fleetdistill_server.testing.cohort import Asked, Event, FakeCohort, Member, always, play
from fleetdistill_server.testing.server import MemoryServer

__all__ = ["Asked", "Event", "FakeCohort", "Member", "MemoryServer", "always", "play"]
