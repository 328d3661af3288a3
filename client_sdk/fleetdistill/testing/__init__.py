"""Helpers for tests of an app with a `Device`: scripted network faults, a manual clock, and an event log.

    clock, events = ManualClock(), EventLog()
    link = FaultyLink(server.link(), lost("upload"), refused("next_ask", "too-many"))
    with Device(server=link, runtime=Runtime(clock=clock), on_event=events.append, ...) as device:
        device.run()

`fleetdistill_server.testing.MemoryServer` is an in-process server for such a link; it requires the extra `server`. The
SDK does not import this package.
"""

from __future__ import annotations

from fleetdistill.device.events import Event
from fleetdistill.testing.clock import ManualClock
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


class EventLog(list[Event]):
    """List of events: `Device(on_event=log.append)`."""

    def kinds(self) -> list[str]:
        """Returns the kinds of all events, in order, without `progress`: its number depends on the machine's speed."""
        return [event.kind for event in self if event.kind != "progress"]

    def of(self, kind: str) -> Event:
        """Returns the only event of a kind. Raises ValueError if there is not exactly one."""
        result = [event for event in self if event.kind == kind]
        if len(result) != 1:
            raise ValueError(
                f"the log has {len(result)} events of kind {kind!r}, expected 1; its kinds are {self.kinds()}"
            )
        return result[0]
