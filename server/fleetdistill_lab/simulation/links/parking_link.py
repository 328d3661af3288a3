"""The link of a device that shares its process with others: a wait for work occupies neither a thread nor a device."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from fleetdistill.errors import FleetDistillError, LinkError
from fleetdistill.link.base import CALL_SECONDS
from fleetdistill.link.grpc_link import Connection, GrpcLink, errors_of
from fleetdistill.link.terms import pause_seconds
from fleetdistill.wire.v1 import service_pb2

_POLL_SECONDS = 60.0
_RETRY_SECONDS = 2.0


class ParkingLink(GrpcLink):
    """A `GrpcLink` whose device does not wait for work in `next_ask`; the process waits with `wait_for_work` instead.

    The link outlives its device, which may be closed while it waits: `close` does nothing.

    Args:
        server: `"host:port"` of the server.
        shared: Connection that the link uses.

    Attributes:
        is_idle: Whether the device has asked for work in vain since this was last set to False.
    """

    def __init__(self, server: str, shared: Connection) -> None:
        super().__init__(server, shared=shared)
        self.is_idle = False
        self._identity = service_pb2.Identity()
        self._reply: service_pb2.NextAskResponse | FleetDistillError | None = None

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Returns the reply that ended the last `wait_for_work`, or else that there is no work, without a call."""
        self._identity = identity
        reply, self._reply = self._reply, None
        if isinstance(reply, FleetDistillError):
            raise reply
        self.is_idle = reply is None
        return reply or service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())

    async def wait_for_work(self) -> None:
        """Waits until the server has a message for the device; while it is unavailable, tries again."""
        while self._reply is None:
            try:
                reply = await self._long_poll()
            except LinkError:  # a restart of the server takes a few seconds
                await asyncio.sleep(random.uniform(_RETRY_SECONDS / 2, _RETRY_SECONDS))
            except FleetDistillError as error:
                self._reply = error
            else:
                if reply.HasField("come_back") and not reply.come_back.reason:
                    await asyncio.sleep(pause_seconds(reply.come_back, self.remote))
                else:
                    self._reply = reply

    async def _long_poll(self) -> service_pb2.NextAskResponse:
        request = service_pb2.NextAskRequest(identity=self._identity, wait_seconds=_POLL_SECONDS)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed after an error of another device
                loop.call_soon_threadsafe(ended.set)

        with errors_of(self._server):
            call = self._stub.NextAsk.future(request, timeout=_POLL_SECONDS + CALL_SECONDS)
            call.add_done_callback(end)
            try:
                await ended.wait()
            finally:
                call.cancel()
            response: service_pb2.NextAskResponse = call.result()
        return response

    def close(self) -> None:
        """Does nothing: the process closes the shared connection."""
