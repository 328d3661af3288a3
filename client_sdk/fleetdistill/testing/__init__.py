"""Helpers for tests of an app with a `Device`: scripted network faults, a manual clock, and an event log.

    clock, events = ManualClock(), EventLog()
    link = FaultyLink(server.link(), lost("upload"), refused("next_ask", "too-many"))
    with Device(server=link, clock=clock, on_event=events.append, ...) as device:
        device.run()

`fleetdistill_server.testing.MemoryServer` is an in-process server for such a link; it requires the extra `server`. The
SDK does not import this package.
"""

from __future__ import annotations

from fleetdistill.testing.clock import ManualClock
from fleetdistill.testing.events import EventLog
from fleetdistill.testing.faults import (
    Fault,
    FaultyLink,
    cut,
    late,
    lost,
    lost_reply,
    oversized,
    refused,
    revoked,
)

__all__ = [
    "EventLog",
    "Fault",
    "FaultyLink",
    "ManualClock",
    "cut",
    "late",
    "lost",
    "lost_reply",
    "oversized",
    "refused",
    "revoked",
]
