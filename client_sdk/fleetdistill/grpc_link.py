"""The link over gRPC. Transport errors become `LinkError`, the server's refusals `RefusedError`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fleetdistill.errors import FleetDistillError, LinkError, RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, service_pb2_grpc

CALL_SECONDS = 30.0
# A stream may take long, but it may not stand still: this bounds the whole of it.
STREAM_SECONDS = 3600.0

# These are safe to repeat, so gRPC itself retries them while the server restarts.
_RETRIED = ["CheckIn", "Heartbeat", "UploadStatus"]
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "fleetdistill.wire.v1.DeviceService", "method": name} for name in _RETRIED],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def is_loopback(address: str) -> bool:
    """Whether `host:port` is on this machine, by its text: 127.x.x.x, ::1 or localhost."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class GrpcLink:
    """Connects to an aggregation server at `host:port`, in plain text (loopback; TLS comes with enrolment)."""

    remote = True

    def __init__(self, server: str) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server, options=_OPTIONS)
        self._poll: Any = None
        self._stub = service_pb2_grpc.DeviceServiceStub(self._channel)

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        with self._errors():
            request = service_pb2.CheckInRequest(identity=identity, profile=profile)
            response: service_pb2.CheckInResponse = self._stub.CheckIn(request, timeout=CALL_SECONDS)
        return response

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        request = service_pb2.NextAskRequest(identity=identity, wait_seconds=wait_seconds)
        with self._errors():
            self._poll = self._stub.NextAsk.future(request, timeout=wait_seconds + CALL_SECONDS)
            response: service_pb2.NextAskResponse = self._poll.result()
        return response

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        with self._errors():
            self._stub.Heartbeat(service_pb2.HeartbeatRequest(identity=identity), timeout=CALL_SECONDS)

    def leave(self, identity: service_pb2.Identity) -> None:
        with self._errors():
            self._stub.Leave(service_pb2.LeaveRequest(identity=identity), timeout=5.0)

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        with self._errors():
            self._stub.Decline(request, timeout=CALL_SECONDS)

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        with self._errors():
            request = service_pb2.UploadStatusRequest(identity=identity, name=name)
            response: service_pb2.UploadStatusResponse = self._stub.UploadStatus(request, timeout=CALL_SECONDS)
        return response

    def upload(
        self, header: service_pb2.UploadHeader, chunks: Iterator[knowledge_pb2.TensorChunk]
    ) -> service_pb2.Receipt:
        with self._errors():
            receipt: service_pb2.Receipt = self._stub.Upload(
                _upload_messages(header, chunks), timeout=STREAM_SECONDS
            ).receipt
        return receipt

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[knowledge_pb2.TensorChunk]]:
        request = service_pb2.DownloadRequest(identity=identity, sha256=sha256, first_byte=first_byte)
        with self._errors():
            stream = self._stub.Download(request, timeout=STREAM_SECONDS)
            first = next(stream, None)
        if first is None or first.WhichOneof("message") != "header":
            raise LinkError(f"the server {self._server} ended a download before its header")
        return first.header, self._chunks(stream)

    def interrupt(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    def close(self) -> None:
        self._channel.close()

    def _chunks(self, stream: Any) -> Iterator[knowledge_pb2.TensorChunk]:
        with self._errors():
            for message in stream:
                yield message.chunk

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise _translated(error, self._server) from error
        except grpc.FutureCancelledError as error:
            raise LinkError("the question for work was cancelled") from error
        except ValueError as error:  # grpc's word for a channel that was closed meanwhile
            raise LinkError(f"the connection to {self._server} is closed") from error


def _upload_messages(
    header: service_pb2.UploadHeader, chunks: Iterator[knowledge_pb2.TensorChunk]
) -> Iterator[service_pb2.UploadRequest]:
    yield service_pb2.UploadRequest(header=header)
    for chunk in chunks:
        yield service_pb2.UploadRequest(chunk=chunk)


def _translated(error: Any, server: str) -> FleetDistillError:
    info = _error_info(error)
    if info is not None and info.reason != Code.INTERNAL:
        return RefusedError(info.reason, error.details(), dict(info.metadata))
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return LinkError(f"the server {server} cannot be reached")
    return LinkError(f"no answer from {server}: {error.code().name}, {error.details()}")


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status else []:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None
