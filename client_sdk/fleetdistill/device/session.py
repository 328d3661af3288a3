"""What the parts of a device share while it is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetdistill.clock import Clock
from fleetdistill.device.guard import Guard
from fleetdistill.link.base import Link
from fleetdistill.state.directory import Storage
from fleetdistill.state.outbox import Pending
from fleetdistill.wire.v1 import service_pb2

if TYPE_CHECKING:
    from fleetdistill.device.compute import Compute


@dataclass
class Session:
    """One device, open; `CheckIn`, `Sender` and `Device` work on it.

    Attributes:
        storage: The state directory.
        link: The connection to the server.
        identity: Run, device id and secret.
        guard: Held while the compute backend or the identity is used.
        clock: What the device waits by.
        terms: The server's reply to the check-in; None before it, and when the device has to check in again.
        compute: Computes for the device; None until it is needed.
        computed: The answer whose state the compute backend holds.
    """

    storage: Storage
    link: Link
    identity: service_pb2.Identity
    guard: Guard
    clock: Clock
    terms: service_pb2.CheckInResponse | None = None
    compute: Compute | None = None
    computed: Pending | None = None

    def forget_state(self) -> None:
        """The compute backend reads its state from the disk before it works again."""
        self.computed = None
        if self.compute is not None:
            self.compute.forget_state()
