"""For tests of server halves, your own or ours: rounds without a store, a server or a network.

`FakeCohort` is the cohort of one round, made of device halves or scripted answers; `play` runs whole rounds. Nothing of
the product imports this package.
"""

from __future__ import annotations

from fleetdistill_server.testing.cohort import Asked, Event, FakeCohort, Member, always, play

__all__ = ["Asked", "Event", "FakeCohort", "Member", "always", "play"]
