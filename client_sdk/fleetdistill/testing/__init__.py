"""For tests of an app that has a `Device` in it: faults of the network, time without waiting, and the events.

    clock, events = ManualClock(), EventLog()
    link = FaultyLink(server.link(), lost("upload"), refused("next_ask", "too-many"))
    with Device(server=link, clock=clock, on_event=events.append, ...) as device:
        device.run()

`fleetdistill_server.testing.MemoryServer` is a server in the test's own process that such a link leads to; it needs the
extra `server`. Nothing of the SDK imports this package, and `import fleetdistill` does not load it.
"""

from __future__ import annotations

from fleetdistill.testing.clock import ManualClock
from fleetdistill.testing.events import EventLog
from fleetdistill.testing.faults import Fault, FaultyLink, cut, lost, lost_reply, refused

__all__ = ["EventLog", "Fault", "FaultyLink", "ManualClock", "cut", "lost", "lost_reply", "refused"]
