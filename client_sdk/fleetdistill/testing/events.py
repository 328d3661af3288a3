"""A list of a device's events, for tests."""

from __future__ import annotations

from fleetdistill.device.events import Event


class EventLog(list[Event]):
    """List of events: `Device(on_event=log.append)`."""

    def kinds(self) -> list[str]:
        """Returns the kinds of all events, in order, without `progress`: its number depends on the machine's speed."""
        return [event.kind for event in self if event.kind != "progress"]

    def of(self, kind: str) -> Event:
        """Returns the only event of a kind. Raises ValueError if there is not exactly one."""
        found = [event for event in self if event.kind == kind]
        if len(found) != 1:
            raise ValueError(
                f"the log has {len(found)} events of kind {kind!r}, expected 1; its kinds are {self.kinds()}"
            )
        return found[0]
