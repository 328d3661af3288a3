"""The real device API and engine in memory behind gRPC in this process; subclasses break a rule of the wire format."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from grpc_status import rpc_status

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code, rich_status
from fleetdistill.wire.framing import frame
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_lab.conformance import RUN_TOML
from fleetdistill_server.testing import MemoryServer

T = TypeVar("T")


class PlainServer(service_pb2_grpc.DeviceServiceServicer):
    """Serves the kit's run. Everything happens in one thread, as a `MemoryServer` requires."""

    def __init__(self) -> None:
        self.memory = MemoryServer(tomllib.loads(RUN_TOML))
        self.link = self.memory.link()

    # --- what subclasses change

    def reply(self, method: str, request: Any, response: Any) -> Any:
        """Changes the reply to a call."""
        return response

    def refusal(self, method: str, request: Any, error: RefusedError) -> RefusedError | None:
        """Changes an error; None accepts the call with an empty reply."""
        return error

    # --- calls

    def CheckIn(self, request: Any, context: Any) -> Any:
        return self._call(
            "CheckIn", request, context, lambda: self.memory.api.check_in(request), service_pb2.CheckInResponse
        )

    def NextAsk(self, request: Any, context: Any) -> Any:
        def next_ask() -> service_pb2.NextAskResponse:
            result = self.link.next_ask(request.identity, 0.0)
            return (
                result if result.WhichOneof("next") else service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())
            )

        return self._call("NextAsk", request, context, next_ask, service_pb2.NextAskResponse)

    def Heartbeat(self, request: Any, context: Any) -> Any:
        make = lambda: self.memory.api.heartbeat(request)  # noqa: E731
        return self._call("Heartbeat", request, context, make, service_pb2.HeartbeatResponse)

    def Leave(self, request: Any, context: Any) -> Any:
        return self._call("Leave", request, context, lambda: self.memory.api.leave(request), service_pb2.LeaveResponse)

    def Decline(self, request: Any, context: Any) -> Any:
        make = lambda: self.memory.api.decline(request)  # noqa: E731
        return self._call("Decline", request, context, make, service_pb2.DeclineResponse)

    def UploadStatus(self, request: Any, context: Any) -> Any:
        make = lambda: self.link.upload_status(request.identity, request.name)  # noqa: E731
        return self._call("UploadStatus", request, context, make, service_pb2.UploadStatusResponse)

    def Upload(self, request_iterator: Any, context: Any) -> Any:
        first = next(request_iterator)

        def upload() -> service_pb2.UploadResponse:
            if not first.HasField("header"):
                raise RefusedError(Code.BAD_MESSAGE, "an upload stream must begin with its header")
            return service_pb2.UploadResponse(receipt=self.link.upload(first.header, _chunks(request_iterator)))

        return self._call("Upload", first, context, upload, service_pb2.UploadResponse)

    def Download(self, request: Any, context: Any) -> Iterator[Any]:
        make = lambda: self.link.download(request.identity, request.sha256, request.first_byte)  # noqa: E731
        header, chunks = self._call("Download", request, context, make, lambda: (None, []))
        result = [service_pb2.DownloadResponse(header=header)]
        for chunk in chunks:
            result.append(service_pb2.DownloadResponse.FromString(frame(chunk)))
        yield from self.reply("Download stream", request, result)

    def _call(self, method: str, request: Any, context: Any, make: Callable[[], Any], empty: Callable[[], Any]) -> Any:
        try:
            return self.reply(method, request, make())
        except RefusedError as error:
            result = self.refusal(method, request, error)
            if result is not None:
                context.abort_with_status(rpc_status.to_status(rich_status(result)))
            return self.reply(method, request, empty())


def _chunks(stream: Iterator[Any]) -> Iterator[Any]:
    for message in stream:
        if not message.HasField("chunk"):
            raise RefusedError(Code.BAD_MESSAGE, "an upload stream must contain one header, then chunks")
        yield message.chunk


@contextlib.contextmanager
def plain_server(kind: type[PlainServer]) -> Iterator[str]:
    """Serves on a free port; yields host and port."""
    pool = ThreadPoolExecutor(1)
    servicer = pool.submit(kind).result()
    server = grpc.server(pool)
    service_pb2_grpc.add_DeviceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
        pool.submit(servicer.memory.close).result()
        pool.shutdown()
