"""What a device needs of the way to its server. `grpc_link` goes over the network, simulation stays in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

__all__ = ["Link"]


class Link(Protocol):
    """The calls of `DeviceService`. Each raises `RefusedError` or `LinkError`, never anything of the transport.

    Attributes:
        remote: True where the server needs heartbeats while the device computes.
    """

    remote: bool

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        """Introduces the device; without a profile only asks for the contract."""

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Asks for work, waiting at most `wait_seconds`."""

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        """Renews the device's lease."""

    def leave(self, identity: service_pb2.Identity) -> None:
        """Ends the device's lease."""

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        """Declines an ask."""

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Asks how far an upload has come."""

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        """Sends an answer; returns the server's durable yes."""

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        """Fetches a payload from `first_byte` on."""

    def interrupt(self) -> None:
        """Ends a `next_ask` that waits in another thread, or in this one below a signal handler."""

    def close(self) -> None:
        """Releases the connection."""
