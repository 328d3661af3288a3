"""The link over gRPC. Transport errors become `LinkError`; refusals of the server become `RefusedError`."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fleetdistill.errors import ConfigurationError, FleetDistillError, LinkError, RefusedError, WorkInterrupted
from fleetdistill.interruption import check_may_continue
from fleetdistill.link.base import reply_limit
from fleetdistill.link.credentials import Credentials
from fleetdistill.link.tls_probe import accepts_tls
from fleetdistill.spans import NO_SPANS, Spans
from fleetdistill.wire.codes import NEED_CERTIFICATE, Code
from fleetdistill.wire.compression import offered
from fleetdistill.wire.framing import frame, unframe
from fleetdistill.wire.payload import AnyChunk, Chunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, service_pb2_grpc

__all__ = ["Connection", "GrpcLink", "error_info", "errors_of"]

LEAVE_SECONDS = 5.0
# Timeout of a whole stream; the server ends streams without progress earlier.
STREAM_SECONDS = 3600.0
_MAX_REUSED_BYTES = 16 << 20
_PROBE_EVERY_SECONDS = 30.0

_UPLOAD = "/fleetdistill.wire.v1.DeviceService/Upload"
_DOWNLOAD = "/fleetdistill.wire.v1.DeviceService/Download"
_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Otherwise all channels of a process to one server share a TCP connection, and with it the server's limit on open
    # calls per connection; calls beyond the limit would wait for other devices' long polls.
    ("grpc.use_local_subchannel_pool", 1),
]


_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")


def is_loopback(address: str) -> bool:
    """Returns whether the host of `host:port` is localhost, ::1 or 127.x.x.x; does not resolve names."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or _LOOPBACK.fullmatch(host) is not None


class CredentialsSource(Protocol):
    """Protocol of a link's source of credentials, such as `fleetdistill.link.enrolment.Enrolment`."""

    def current(self) -> Credentials:
        """Returns valid credentials; repeated calls return the same object until the credentials change."""

    def enrol_again(self) -> bool:
        """Obtains other credentials for a server that may not admit the current ones; returns whether there are any."""


class Connection:
    """An open channel to a server, which several links of one process may share if it is in plain text.

    Args:
        server: `"host:port"` of the server.
        credentials: The device's credentials; None for plain text.
    """

    def __init__(self, server: str, credentials: Credentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(server, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(server, credentials.channel(), options=_OPTIONS)
        self.stub = service_pb2_grpc.DeviceServiceStub(self._channel)
        # takes bytes
        self.stub.Upload = self._channel.stream_unary(_UPLOAD, None, service_pb2.UploadResponse.FromString)
        self.stub.Download = self._channel.unary_stream(
            _DOWNLOAD,
            service_pb2.DownloadRequest.SerializeToString,
            functools.partial(unframe, kind=service_pb2.DownloadResponse),
        )

    def close(self) -> None:
        """Closes the channel; calls on it end with an error."""
        self._channel.close()


class GrpcLink:
    """Link to an aggregation server over gRPC. Implements `Link`.

    Args:
        server: `"host:port"` of the server.
        source: Source of the device's credentials, or None for plain text. A new certificate opens a new connection;
            pending calls complete on the old one.
        shared: Connection in plain text that the link uses and does not close; None for a connection of its own.
        spans: Records the device's spans; passes their place in a trace with the calls.
    """

    remote = True

    def __init__(
        self,
        server: str,
        source: CredentialsSource | None = None,
        shared: Connection | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        self._server = server
        self._spans = spans
        self._source = source
        self._opening = threading.Lock()
        self._used: Credentials | None = None
        self._broken = False  # whether the connection has failed; a new one does not wait to connect again
        self._own: list[Connection] = []
        self._calls: set[Any] = set()  # the calls that `interrupt` cancels
        self._probe_at, self._accepts_tls = 0.0, False
        if shared is not None:
            self._connection = shared
        elif source is None:
            self._open(Connection(server))

    @property
    def _stub(self) -> Any:
        """Stub of a connection with a valid certificate."""
        fresh = None if self._source is None else self._source.current()
        with self._opening:
            if fresh is not self._used or self._broken:
                self._open(Connection(self._server, fresh))
                self._used, self._broken = fresh, False
        return self._connection.stub

    def _open(self, connection: Connection) -> None:
        if len(self._own) > 1:
            self._own.pop(0).close()  # two certificates older, so it has no pending calls
        self._own.append(connection)
        self._connection = connection

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        with self._errors():
            request = service_pb2.CheckInRequest(identity=identity, profile=profile)
            call = self._stub.CheckIn.future(request, timeout=reply_limit())
            response: service_pb2.CheckInResponse = self._cancellable(call).result()
        return response

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        request = service_pb2.NextAskRequest(identity=identity, wait_seconds=wait_seconds)
        with self._errors():
            call = self._stub.NextAsk.future(request, timeout=wait_seconds + reply_limit())
            response: service_pb2.NextAskResponse = self._cancellable(call).result()
            self._take_place(call)
        return response

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        with self._errors():
            self._stub.Heartbeat(service_pb2.HeartbeatRequest(identity=identity), timeout=reply_limit())

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        with self._errors():
            request = service_pb2.LeaveRequest(identity=identity, forget=forget)
            call = self._stub.Leave.future(request, timeout=LEAVE_SECONDS)
            response: service_pb2.LeaveResponse = self._cancellable(call).result()
        return response.forget_recorded

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        with self._errors():
            self._stub.Decline(request, timeout=reply_limit())

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        with self._errors():
            request = service_pb2.UploadStatusRequest(identity=identity, name=name)
            call = self._stub.UploadStatus.future(request, timeout=reply_limit())
            response: service_pb2.UploadStatusResponse = self._cancellable(call).result()
            self._take_place(call)
        return response

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        _keep_freed_chunks()
        with self._errors():
            messages = self._until_interrupted(_upload_messages(header, chunks))
            call = self._stub.Upload.future(messages, timeout=STREAM_SECONDS, metadata=self._spans.headers())
            receipt: service_pb2.Receipt = self._cancellable(call).result().receipt
        return receipt

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        request = service_pb2.DownloadRequest(
            identity=identity, sha256=sha256, first_byte=first_byte, compressions=offered()
        )
        _keep_freed_chunks()
        with self._errors():
            call = self._stub.Download(request, timeout=STREAM_SECONDS, metadata=self._spans.headers())
            stream = self._cancellable(call)
            first = next(stream, None)
        if first is None or isinstance(first, Chunk) or not first.HasField("header"):
            raise LinkError(f"server {self._server} ended a download before its header")
        return first.header, self._chunks(stream)

    def _take_place(self, call: Any) -> None:
        if self._spans.on:
            self._spans.take(call.trailing_metadata())

    def interrupt(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def close(self) -> None:
        for connection in self._own:
            connection.close()

    def _chunks(self, stream: Any) -> Iterator[AnyChunk]:
        with self._errors():
            for message in stream:
                if not isinstance(message, Chunk):
                    raise LinkError(f"server {self._server} sent a message without a chunk in a download")
                yield message

    def _cancellable(self, call: Any) -> Any:
        """Returns a call after making it one that `interrupt` cancels."""
        self._calls.add(call)
        if not call.add_callback(lambda: self._calls.discard(call)):
            self._calls.discard(call)  # the call is already complete
        try:
            check_may_continue()  # an interruption before this check may have missed the call, a later one cancels it
        except FleetDistillError:
            call.cancel()
            raise
        return call

    def _until_interrupted(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yields an upload's messages in a thread of gRPC, which logs exceptions; an interruption cancels the call."""
        try:
            yield from messages
        except WorkInterrupted:
            self.interrupt()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with _as_link_errors(self._server):
                yield
        except _NotAdmitted as error:
            self._broken = bool(self._own)
            self._check_tls(error)
            raise LinkError(str(error)) from None
        except LinkError as error:
            self._check_tls(error)
            raise

    def _check_tls(self, error: LinkError) -> None:
        """Raises a better error if the server accepts TLS, which gRPC does not report of each address of a host.

        Raises:
            ConfigurationError: A call in plain text failed because the server requires TLS.
            LinkError: The TLS handshake of gRPC failed, or the server did not admit the certificate; the device has
                enrolled again if it had a token that was not tried.
        """
        if self._source is not None and not isinstance(error, _NotAdmitted):
            return
        if time.monotonic() >= self._probe_at:
            self._probe_at = time.monotonic() + _PROBE_EVERY_SECONDS
            self._accepts_tls = accepts_tls(self._server)
        if not self._accepts_tls:
            return
        if self._source is None:
            raise ConfigurationError(
                f"server {self._server} requires TLS: pass the operator's token from `fleetdistill enrol`, or a file "
                "with the token, as Server(enrolment=...)"
            )
        if self._source.enrol_again():
            text = "does not admit this device's certificate any more; the device has enrolled again with its token"
            raise LinkError(f"server {self._server} {text}") from error
        if _NOTHING_LISTENS in str(error):
            raise LinkError(
                f"server {self._server} cannot be reached; it listens, but the TLS handshake failed: "
                f"{_BAD_CERTIFICATE}, or it does not admit this device's certificate"
            ) from error
        if isinstance(error, _NotAdmitted) and not error.has_reason:
            text = "cannot be reached, but accepts connections: it may not admit this device's certificate any more"
            raise LinkError(f"server {self._server} {text}; if this goes on, pass a new enrolment token") from error


class _NotAdmitted(LinkError):
    """A server that cannot be reached, or whose CA has changed: it may not admit the device's certificate."""

    def __init__(self, text: str, *, has_reason: bool) -> None:
        super().__init__(text)
        self.has_reason = has_reason


@contextlib.contextmanager
def errors_of(server: str, identity: Path | None = None) -> Iterator[None]:
    """Converts gRPC exceptions raised in the block to `LinkError` or `RefusedError`.

    Args:
        server: `"host:port"` of the server.
        identity: Directory with the certificate of the caller, a person.
    """
    try:
        with _as_link_errors(server):
            yield
    except _NotAdmitted as error:
        text = str(error)
        if identity is not None and not error.has_reason and accepts_tls(server):
            text += f", but accepts connections: it may not admit the certificate in {identity} any more, for example "
            text += "after a change of its CA. Ask its operator for a new one of `fleetdistill pki issue`"
        raise LinkError(text) from None


@contextlib.contextmanager
def _as_link_errors(server: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _translate(error, server) from None  # the message has what gRPC says; its lines help no app
    except grpc.FutureCancelledError as error:
        raise LinkError("the call was cancelled") from error
    except ValueError as error:  # raised by grpc for a closed channel
        raise LinkError(f"the connection to {server} is closed") from error


@functools.cache
def _keep_freed_chunks() -> None:
    """Makes glibc reuse the memory of freed chunks; has no effect with other C libraries.

    By default glibc returns large blocks to the system when they are freed, and allocates them again page by page,
    which takes longer than the rest of a stream. After a larger block was freed once, glibc keeps blocks up to that
    size. The block freed here is never written, so it uses no memory.
    """
    np.empty(_MAX_REUSED_BYTES, np.uint8)


def _upload_messages(header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> Iterator[bytes]:
    yield service_pb2.UploadRequest(header=header).SerializeToString()
    for chunk in chunks:
        yield frame(chunk)


def _translate(error: Any, server: str) -> FleetDistillError:
    info = error_info(error)
    if info is not None and info.reason not in (Code.INTERNAL, *NEED_CERTIFICATE):
        return RefusedError(info.reason, error.details(), dict(info.metadata))
    details = error.details() or ""
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        reason = next((text for pattern, text in _REASONS.items() if re.search(pattern, details)), "")
        return _NotAdmitted(f"server {server} cannot be reached{reason and '; '}{reason}", has_reason=bool(reason))
    if info is not None and info.reason in NEED_CERTIFICATE:
        return _NotAdmitted(f"server {server} refuses the call: {details}", has_reason=True)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return LinkError(f"server {server} did not answer in time; check the network, and the server's log and load")
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return LinkError(
            f"{server} does not serve this call ({details}); pass the port of the server's `[server] listen`"
        )
    return LinkError(f"call to server {server} failed: {error.code().name}, {details}")


_BAD_CERTIFICATE = (
    "its certificate is not from a trusted CA, as after a change of its CA, not for this host name, or expired; on a "
    "device, `fleetdistill doctor` tells which"
)
_NOTHING_LISTENS = "nothing listens on this port; check the port, and whether the server is running"
_TIMED_OUT = "the connection timed out; check the address, and firewalls on the way"
_REASONS = {
    "certificate has expired": "its certificate has expired; the operator has to renew it",
    "CERTIFICATE_VERIFY_FAILED|Hostname Verification Check failed": _BAD_CERTIFICATE,
    "address lookup failed|DNS resolution failed|errors resolving": (
        "the host name cannot be resolved; check the name and this machine's DNS"
    ),
    "SETTINGS frame|HTTP/2|http1": (
        "what listens on this port does not answer as a gRPC server in plain text; check the port, and whether the "
        "server requires TLS"
    ),
    r"Handshake read failed \(Endpoint closing\)": (
        "it accepts connections, but answers no TLS handshake; check the port, and the server's log and load"
    ),
    "tcp handshaker shutdown": _TIMED_OUT,  # what gRPC says of a connection that nobody answers
    "SSL_ERROR|[Hh]andshake|WRONG_VERSION_NUMBER|TSI_": (
        "the TLS handshake failed; check the port, and whether the server uses TLS and admits this certificate"
    ),
    "refused": _NOTHING_LISTENS,
    "timed out|Timeout|TIMEOUT": _TIMED_OUT,
}
"""Reasons by a pattern in the details of gRPC's status UNAVAILABLE, of which the first that fits counts."""


def error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    """Returns the details of a gRPC error; None without any that can be read, as after a failure of the transport."""
    with contextlib.suppress(DecodeError, ValueError):  # a server can send any bytes
        status = rpc_status.from_call(error)
        for detail in status.details if status else []:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                return info
    return None
