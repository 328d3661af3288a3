"""The events of a device, kept."""

from __future__ import annotations

from fleetdistill.device.events import Event


class EventLog(list[Event]):
    """A list of events: `Device(on_event=log.append)`."""

    def kinds(self) -> list[str]:
        """The kind of each event, in order."""
        return [event.kind for event in self]

    def of(self, kind: str) -> Event:
        """The only event of a kind. Raises ValueError where there is none, or more than one."""
        found = [event for event in self if event.kind == kind]
        if len(found) != 1:
            raise ValueError(f"{len(found)} events are of kind {kind!r}, expected 1; the kinds are {self.kinds()}")
        return found[0]
