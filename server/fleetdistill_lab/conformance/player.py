"""One device of the conformance kit: plain calls, without retries and without checks of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import google_crc32c
import grpc

from fleetdistill.errors import RefusedError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.link.base import CALL_SECONDS
from fleetdistill.link.downloads import BytesSource
from fleetdistill.link.grpc_link import error_info
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.framing import frame
from fleetdistill.wire.payload import CHUNK_BYTES, AnyChunk, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

SAMPLES = 8


@dataclass
class Player:
    """A device that makes single calls.

    Attributes:
        stub: Stub of the server's `DeviceService`.
        device: Id.
        run: Name of the run.
        secret: Secret of the id.
        ask: The device's ask, once it has one.
    """

    stub: Any
    device: str
    run: str = ""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    ask: service_pb2.Ask = field(default_factory=service_pb2.Ask)

    @property
    def identity(self) -> service_pb2.Identity:
        """Identity for requests."""
        return service_pb2.Identity(run=self.run, device=self.device, secret=self.secret)

    def check_in(self, profile: contract_pb2.DeviceProfile | None) -> service_pb2.CheckInResponse:
        """Checks in, or requests the contract."""
        request = service_pb2.CheckInRequest(identity=self.identity, profile=profile)
        return cast(service_pb2.CheckInResponse, self.call("CheckIn", request))

    def next_ask(self, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Requests work."""
        request = service_pb2.NextAskRequest(identity=self.identity, wait_seconds=wait_seconds)
        return cast(service_pb2.NextAskResponse, self.call("NextAsk", request))

    def heartbeat(self) -> bool:
        """Returns whether the device has an open ask."""
        return bool(self.call("Heartbeat", service_pb2.HeartbeatRequest(identity=self.identity)).ask_open)

    def leave(self) -> None:
        """Ends the lease."""
        self.call("Leave", service_pb2.LeaveRequest(identity=self.identity))

    def decline(self) -> None:
        """Declines the ask."""
        request = service_pb2.DeclineRequest(identity=self.identity, round=self.ask.round, reason="a conformance test")
        request.step_number = self.ask.step_number
        self.call("Decline", request)

    def name(self, **changes: Any) -> service_pb2.UploadName:
        """Returns the name of the upload for the ask."""
        ask = self.ask
        usual = {
            "round": ask.round,
            "step_number": ask.step_number,
            "attempt": ask.first_attempt,
            "payload": ask.payload,
        }
        return service_pb2.UploadName(**{**usual, **changes})

    def status(self, **changes: Any) -> service_pb2.UploadStatusResponse:
        """Returns the status of the upload for the ask."""
        request = service_pb2.UploadStatusRequest(identity=self.identity, name=self.name(**changes))
        return cast(service_pb2.UploadStatusResponse, self.call("UploadStatus", request))

    def upload(
        self, payload: knowledge_pb2.PayloadHeader, chunks: Iterable[AnyChunk], name: Any = None, **changes: Any
    ) -> service_pb2.Receipt:
        """Sends a stream with a header and these chunks."""
        usual = {"identity": self.identity, "name": name or self.name(), "payload": payload, "samples": SAMPLES}
        header = service_pb2.UploadHeader(**{**usual, **changes})
        return self.send([service_pb2.UploadRequest(header=header), *messages(chunks)])

    def send(self, stream: Iterable[service_pb2.UploadRequest]) -> service_pb2.Receipt:
        """Sends any stream of messages."""
        response: service_pb2.UploadResponse = self.stub.Upload(iter(stream), timeout=CALL_SECONDS)
        return response.receipt

    def download(self, sha256: bytes, first_byte: int = 0) -> tuple[knowledge_pb2.PayloadHeader, list[Any]]:
        """Returns the header of a payload, and the chunks from a byte on."""
        request = service_pb2.DownloadRequest(identity=self.identity, sha256=sha256, first_byte=first_byte)
        first, *rest = self.stub.Download(request, timeout=CALL_SECONDS)
        return first.header, [item.chunk for item in rest]

    def call(self, method: str, request: Any) -> Any:
        """Makes a unary call."""
        return getattr(self.stub, method)(request, timeout=CALL_SECONDS)


def messages(chunks: Iterable[AnyChunk]) -> list[service_pb2.UploadRequest]:
    """Returns chunks as messages of an upload."""
    return [service_pb2.UploadRequest.FromString(frame(chunk)) for chunk in chunks]


def chunks_of(payload: Payload, first_byte: int = 0, size: int = CHUNK_BYTES) -> list[knowledge_pb2.Chunk]:
    """Returns a payload's data from a byte on as chunks of at most `size` bytes."""
    stop = payload.data_bytes
    starts = range(first_byte, stop, size)
    return [chunk(start, payload.source.read(start, min(size, stop - start))) for start in starts]


def chunk(offset: int, data: bytes) -> knowledge_pb2.Chunk:
    """Returns a chunk with its checksum."""
    return knowledge_pb2.Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))


def answer_from(header: knowledge_pb2.PayloadHeader, data: bytes) -> ModelParameters | None:
    """Returns the model in an ask's payload; None if it has no part `parameters`."""
    payload = Payload(header.parts, slots(header.parts), BytesSource(data), header.sha256)
    result = decode(payload).get("parameters")
    return result if isinstance(result, ModelParameters) else None


def payload_of(model: ModelParameters) -> Payload:
    """Returns the answer with a model."""
    return encode({"parameters": model})


def refusal_of(make: Callable[[], object]) -> tuple[RefusedError | None, str]:
    """Makes a call; returns its error, or None if it was accepted or failed without a code, and its gRPC status."""
    try:
        make()
    except grpc.RpcError as error:
        info = error_info(error)
        result = RefusedError(info.reason, error.details(), dict(info.metadata)) if info is not None else None
        return result, error.code().name
    return None, "OK"
