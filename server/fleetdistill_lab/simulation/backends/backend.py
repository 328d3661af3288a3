"""`Backend`, the interface of what computes devices' work outside the simulation's process, and its messages.

The result of a `Task` depends only on the task and the run. A backend may therefore compute it anywhere, and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from fleetdistill.compute.base import Computed
from fleetdistill.errors import FleetDistillError
from fleetdistill.link.downloads import check_payload
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import knowledge_pb2
from fleetdistill_lab.simulation.spec.device import DeviceSpec


@dataclass(frozen=True)
class PackedPayload:
    """A payload as bytes.

    Attributes:
        header: Serialized `PayloadHeader`.
        data: Bytes of all tensors.
    """

    header: bytes
    data: bytes

    @classmethod
    def of(cls, payload: Payload) -> PackedPayload:
        """Returns a payload's bytes."""
        return cls(payload.header().SerializeToString(), payload.source.read(0, payload.data_bytes))

    def unpacked(self) -> Payload:
        """Returns the payload, after a check of its digest."""
        header = knowledge_pb2.PayloadHeader.FromString(self.header)
        return check_payload(header, self.data, header.sha256)


@dataclass(frozen=True)
class RunData:
    """What all tasks of a run need.

    Attributes:
        contract: Serialized contract.
        payloads: Payloads of the contract, by digest: initial weights and proxy set.
    """

    contract: bytes
    payloads: Mapping[bytes, PackedPayload]


@dataclass(frozen=True)
class Task:
    """Work of one device.

    Attributes:
        spec: The device.
        state: Saved state of the device's compute backend; None for the run's initial weights.
        delivered: Saved delivered model, with `state`.
        ask: Serialized ask to answer; empty for none.
        allow: Columns that the answer may contain.
        prepare_only: Whether only the device's description is wanted.
        payload: Payload of the ask, which `ask` names by its digest; None for an ask without one.
    """

    spec: DeviceSpec
    state: bytes | None = None
    delivered: bytes | None = None
    ask: bytes = b""
    allow: tuple[str, ...] = ()
    prepare_only: bool = False
    payload: PackedPayload | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Description:
    """What a device reports about itself when it checks in.

    Attributes:
        profile: Serialized profile.
        data_digest: SHA-256 of the training data.
        wanted_payloads: Digests of the contract's payloads that the device downloads.
    """

    profile: bytes
    data_digest: bytes
    wanted_payloads: tuple[bytes, ...]


@dataclass(frozen=True)
class Result:
    """Result of a task.

    Attributes:
        description: Description of the device; None if it could not be prepared.
        first: State and delivered model before the ask, for a task without a state; else None.
        computed: Answer to the ask; None for a task without an ask, or after an error.
        error: What the work has raised; None if it succeeded.
        fault: Text of an exception that must end the simulation; empty for none.
    """

    description: Description | None = None
    first: tuple[bytes, bytes] | None = None
    computed: Computed | None = None
    error: FleetDistillError | None = None
    fault: str = ""


class Backend(Protocol):
    """Computes tasks in other processes, several at a time."""

    def submit(self, task: Task) -> Future[Result]:
        """Starts a task and returns immediately.

        A worker that dies is replaced and costs its task one retry. The future raises RunError if the second worker
        dies too.
        """

    def close(self) -> None:
        """Ends the backend's processes, and discards unfinished tasks."""


MakeBackend = Callable[[RunData], Backend]
