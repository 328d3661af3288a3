"""The shared state of an open device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetdistill.clock import Clock
from fleetdistill.device.consent import Consent
from fleetdistill.device.guard import Guard
from fleetdistill.device.permission import Permission
from fleetdistill.link.base import HandsOver, Link
from fleetdistill.spans import NO_SPANS, Spans
from fleetdistill.state.directory import Storage
from fleetdistill.state.outbox import Pending
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute


@dataclass
class Session:
    """State of an open device, shared by `Device`, `CheckIn`, `AskHandler` and `Sender`.

    Attributes:
        storage: State directory.
        link: Connection to the server.
        identity: Run, device id and secret.
        guard: Lock held while the compute backend or the identity is used.
        clock: Clock for waits and time limits.
        consent: Columns that may leave the device.
        permission: Whether the device may work now, and how much.
        terms: Server's reply to the check-in; None if the device has to check in.
        compute: Compute backend; None before its first use.
        computed: Answer whose state the compute backend holds, or None.
        same_process: The link, if the server is in this process and takes answers as they are; else None.
        ask_interrupted: Whether the work on the last ask was interrupted, and is done again later.
        spans: Records spans of the device's work.
    """

    storage: Storage
    link: Link
    identity: service_pb2.Identity
    guard: Guard
    clock: Clock
    consent: Consent
    permission: Permission
    terms: service_pb2.CheckInResponse | None = None
    compute: Compute | None = None
    computed: Pending | None = None
    same_process: HandsOver | None = None
    ask_interrupted: bool = False
    spans: Spans = NO_SPANS

    def forget_state(self) -> None:
        """Makes the compute backend restore its state from the disk before its next use."""
        self.computed = None
        if self.compute is not None:
            self.compute.forget_state()
