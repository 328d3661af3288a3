"""A link that counts the bytes of all messages, and whose calls end when the device's work is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

from fleetdistill.errors import LinkError
from fleetdistill.interruption import bound_check, check_may_continue
from fleetdistill.link.base import Link
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

Reply = TypeVar("Reply", bound=Message)


class MeteredLink:
    """`fleetdistill.link.base.Link` that forwards calls to another link.

    Before a call, after a failed call and before each chunk it raises the errors of `check_may_continue`. Heartbeats,
    declines and `leave` are not interrupted: they keep the server from waiting for the device.

    Args:
        link: Link that receives the calls.
        count: Called from any thread with the number of bytes sent or received, without those of HTTP/2 and TLS.
    """

    def __init__(self, link: Link, count: Callable[[int], None]) -> None:
        self._link, self._count = link, count
        self.remote = link.remote

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        """Forwards the call."""
        self._count(identity.ByteSize() + (profile.ByteSize() if profile is not None else 0))
        return self._reply(lambda: self._link.check_in(identity, profile))

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Forwards the call."""
        self._count(identity.ByteSize())
        return self._reply(lambda: self._link.next_ask(identity, wait_seconds))

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        """Forwards the call."""
        self._count(identity.ByteSize())
        self._link.heartbeat(identity)

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        """Forwards the call."""
        self._count(identity.ByteSize())
        return self._link.leave(identity, forget=forget)

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        """Forwards the call."""
        self._count(request.ByteSize())
        self._link.decline(request)

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Forwards the call."""
        self._count(identity.ByteSize() + name.ByteSize())
        return self._reply(lambda: self._link.upload_status(identity, name))

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        """Forwards the call."""
        self._count(header.ByteSize())
        counted = self._counted(chunks)
        return self._reply(lambda: self._link.upload(header, counted))

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        """Forwards the call."""
        self._count(identity.ByteSize() + len(sha256))
        with _interruptible():
            header, chunks = self._link.download(identity, sha256, first_byte)
        self._count(header.ByteSize())
        return header, self._counted(chunks)

    def interrupt(self) -> None:
        """Forwards the call."""
        self._link.interrupt()

    def close(self) -> None:
        """Forwards the call."""
        self._link.close()

    def _reply(self, call: Callable[[], Reply]) -> Reply:
        with _interruptible():
            reply = call()
        self._count(reply.ByteSize())
        return reply

    def _counted(self, chunks: Iterator[AnyChunk]) -> Iterator[AnyChunk]:
        check = bound_check()  # gRPC reads an upload's chunks in a thread of its own
        return self._count_chunks(chunks, check)

    def _count_chunks(self, chunks: Iterator[AnyChunk], check: Callable[[], None]) -> Iterator[AnyChunk]:
        while True:
            check()
            with _interruptible(check):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self._count(_bytes_of(chunk))
            yield chunk


@contextlib.contextmanager
def _interruptible(check: Callable[[], None] = check_may_continue) -> Iterator[None]:
    """Raises the errors of a check before the block, and instead of a LinkError from the block."""
    check()
    try:
        yield
    except LinkError:
        check()  # the call was cancelled because the work was interrupted
        raise


def _bytes_of(chunk: AnyChunk) -> int:
    return chunk.ByteSize() if isinstance(chunk, knowledge_pb2.TensorChunk) else len(chunk.data)
