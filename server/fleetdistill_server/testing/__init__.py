"""For tests of your own: rounds of a server half without a store, and a whole server without a network.

`FakeCohort` is the cohort of one round, made of device halves or scripted answers; `play` runs whole rounds.
`MemoryServer` serves a run to devices of the test's own process; `fleetdistill.testing` has faults and a clock for it.
Nothing of the product imports this package.
"""

from __future__ import annotations

from fleetdistill_server.testing.cohort import Asked, Event, FakeCohort, Member, always, play
from fleetdistill_server.testing.server import MemoryServer

__all__ = ["Asked", "Event", "FakeCohort", "Member", "MemoryServer", "always", "play"]
