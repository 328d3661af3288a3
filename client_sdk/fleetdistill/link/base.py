"""`Link`, the protocol of a device's connection to the server; over gRPC, or in memory in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from fleetdistill.wire.codec import Payload
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

__all__ = ["CALL_SECONDS", "HandsOver", "Link"]


CALL_SECONDS = 30.0
"""How long a call waits for its reply, besides the time for which the server may hold it."""
_limit: ContextVar[float] = ContextVar("fleetdistill_reply_limit", default=CALL_SECONDS)


@contextmanager
def replies_within(seconds: float) -> Iterator[None]:
    """Limits how long calls but streams, which have limits of their own, wait for their replies in the block."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


def reply_limit() -> float:
    """Returns how long a call waits for its reply, in seconds."""
    return _limit.get()


class Link(Protocol):
    """Calls of the server's `DeviceService`.

    Every call raises `RefusedError` or `LinkError`, never an exception of the transport.

    Attributes:
        remote: Whether the device must send heartbeats while it computes.
    """

    remote: bool

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        """Checks the device in; without a profile it only returns the contract."""

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Requests work; waits at most `wait_seconds` for an ask."""

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        """Renews the device's lease."""

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        """Ends the device's lease.

        Args:
            identity: Identity of the device.
            forget: Whether the server must also delete what the device has sent.

        Returns:
            Whether the server has durably recorded that request.
        """

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        """Declines an ask."""

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Returns the status of an upload: the receipt, or the number of bytes received."""

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        """Sends an answer; returns its receipt, which the server issues once the answer is durable."""

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        """Returns the header of a payload and its chunks from `first_byte` on."""

    def interrupt(self) -> None:
        """Cancels the pending calls, except heartbeats. Thread-safe; may be called from a signal handler."""

    def close(self) -> None:
        """Releases the connection."""


@runtime_checkable
class HandsOver(Protocol):
    """Optional protocol of a `Link` to a server in the same process: payloads change hands without being copied.

    The server's checks of an answer's header and values are those of `upload`. Chunks, their checksums and compression
    are left out; the bytes that they would have on a network are counted.
    """

    def hand_over(self, identity: service_pb2.Identity, sha256: bytes) -> Payload:
        """Returns a payload of the server; see `download`."""

    def take(self, header: service_pb2.UploadHeader, payload: Payload) -> service_pb2.Receipt:
        """Gives the server an answer; see `upload`. The device must not change the payload's arrays afterwards."""
