"""A liar behind gRPC on the loopback: its words as bytes, some of them bytes that are no message."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
from fuzz.hostile import mangled_bytes
from fuzz.liar import Liar
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.wire.codes import DOMAIN, status_of
from fleetdistill.wire.v1 import service_pb2

_SERVICE = "fleetdistill.wire.v1.DeviceService"
_DETAIL_BYTES = 1000  # what fits into trailing metadata


class LyingServer:
    """Serves one liar; one call at a time.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, liar: Liar) -> None:
        self._liar, self._lock = liar, threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, self._handlers()),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Ends it at once."""
        self._server.stop(None).wait()

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        liar = self._liar
        unary: dict[str, tuple[type[Message], Callable[[Any], Message]]] = {
            "CheckIn": (service_pb2.CheckInRequest, lambda request: liar.terms()),
            "NextAsk": (service_pb2.NextAskRequest, lambda request: liar.next()),
            "Heartbeat": (service_pb2.HeartbeatRequest, lambda request: liar.word(service_pb2.HeartbeatResponse())),
            "Leave": (service_pb2.LeaveRequest, lambda request: liar.word(service_pb2.LeaveResponse())),
            "Decline": (service_pb2.DeclineRequest, self._decline),
            "UploadStatus": (
                service_pb2.UploadStatusRequest,
                lambda request: liar.word(service_pb2.UploadStatusResponse(ask_open=True)),
            ),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._answers(make), kind.FromString)
            for name, (kind, make) in unary.items()
        }
        handlers["Upload"] = grpc.stream_unary_rpc_method_handler(self._upload, service_pb2.UploadRequest.FromString)
        handlers["Download"] = grpc.unary_stream_rpc_method_handler(
            self._download, service_pb2.DownloadRequest.FromString
        )
        return handlers

    def _answers(self, make: Callable[[Any], Message]) -> Callable[[Any, Any], bytes]:
        def answer(request: Any, context: Any) -> bytes:
            with self._lock, _statuses(context):
                self._liar.refuse()
                return self._bytes(make(request))

        return answer

    def _decline(self, request: Any) -> Message:
        self._liar.go_on()
        return self._liar.word(service_pb2.DeclineResponse())

    def _upload(self, requests: Iterator[Any], context: Any) -> bytes:
        header = next(requests).header
        for _ in requests:
            pass
        with self._lock, _statuses(context):
            self._liar.refuse()
            self._liar.go_on()
            return self._bytes(self._liar.receipt(header))

    def _download(self, request: Any, context: Any) -> Iterator[bytes]:
        with self._lock, _statuses(context):
            self._liar.refuse()
            words = [self._bytes(word) for word in self._liar.download(request.sha256)]
        yield from words

    def _bytes(self, word: Message) -> bytes:
        data = word.SerializeToString()
        if self._liar.random.random() < 0.05 * self._liar.rate:
            self._liar.count("bytes")
            return mangled_bytes(self._liar.random, data)
        return data


@contextlib.contextmanager
def _statuses(context: Any) -> Iterator[None]:
    """A liar's errors as gRPC statuses, as the front makes them."""
    try:
        yield
    except RefusedError as refusal:
        info = error_details_pb2.ErrorInfo(reason=refusal.code, domain=DOMAIN)
        info.metadata.update({name: value[:_DETAIL_BYTES] for name, value in refusal.details.items()})
        _abort(context, status_of(refusal.code) or "UNKNOWN", str(refusal), info)
    except LinkError as error:
        _abort(context, "INTERNAL", str(error), None)


def _abort(context: Any, status: str, text: str, info: error_details_pb2.ErrorInfo | None) -> NoReturn:
    result = status_pb2.Status(code=getattr(grpc.StatusCode, status).value[0], message=text[:_DETAIL_BYTES])
    if info is not None:
        packed = AnyMessage()
        packed.Pack(info)
        result.details.append(packed)
    context.abort_with_status(rpc_status.to_status(result))
    raise AssertionError("abort raises")


@contextlib.contextmanager
def lying_server(liar: Liar) -> Iterator[LyingServer]:
    """Serves until the end of the block."""
    server = LyingServer(liar)
    try:
        yield server
    finally:
        server.stop()
