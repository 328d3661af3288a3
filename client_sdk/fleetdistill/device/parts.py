"""What the parts of an open device share."""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill.clock import Clock
from fleetdistill.device.consent import Consent
from fleetdistill.device.events import DeviceLock, Events
from fleetdistill.device.permission import Permission
from fleetdistill.link.base import HandsOver, Link
from fleetdistill.spans import NO_SPANS, Spans
from fleetdistill.state.directory import Storage
from fleetdistill.wire.v1 import service_pb2


@dataclass(frozen=True)
class DeviceParts:
    """What does not change while a device is open.

    Attributes:
        storage: State directory.
        link: Connection to the server.
        identity: Run, device id and secret; the first check-in adds the name of the run.
        server_address: `"host:port"` of the server; empty if the app passes a link.
        events: Emits events to the app.
        lock: Held while the compute backend or the identity is used.
        clock: Clock for waits and time limits.
        consent: Columns that may leave the device.
        permission: Whether the device may work now, and how much.
        same_process: The link, if the server is in this process and takes answers as they are; else None.
        spans: Records spans of the device's work.
    """

    storage: Storage
    link: Link
    identity: service_pb2.Identity
    server_address: str
    events: Events
    lock: DeviceLock
    clock: Clock
    consent: Consent
    permission: Permission
    same_process: HandsOver | None = None
    spans: Spans = NO_SPANS
