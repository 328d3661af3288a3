"""An error of the link says what is wrong: the name, the port, the network or TLS."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2
from support.live_front import prepare_store
from support.secured import device_credentials, make_pki, secured_front

from fleetdistill.errors import LinkError
from fleetdistill.link.credentials import Credentials
from fleetdistill.link.grpc_link import CredentialsSource, GrpcLink, errors_of
from fleetdistill.wire.v1 import service_pb2


def error_of(server: str, source: CredentialsSource | None = None) -> str:
    """What one call to a server says."""
    link = GrpcLink(server, source)
    try:
        with pytest.raises(LinkError) as error:
            link.next_ask(service_pb2.Identity(run="r", device="d"), 0)
    finally:
        link.close()
    return str(error.value)


@contextlib.contextmanager
def http_server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_name_that_cannot_be_resolved() -> None:
    name = "x" * 64 + ".invalid"  # a label has at most 63 characters, so no name server is asked
    assert error_of(f"{name}:50051") == (
        f"server {name}:50051 cannot be reached; the host name cannot be resolved; check the name and this "
        "machine's DNS"
    )


def test_a_port_on_which_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert error_of(f"127.0.0.1:{port}") == (
        f"server 127.0.0.1:{port} cannot be reached; nothing listens on this port; check the port, and whether the "
        "server is running"
    )


def test_a_port_of_another_protocol() -> None:
    with http_server() as port:
        assert "what listens on this port does not answer as a gRPC server" in error_of(f"127.0.0.1:{port}")


def test_a_port_of_another_grpc_server() -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        said = error_of(f"127.0.0.1:{port}")
        server.stop(0).wait()
    assert said.startswith(f"127.0.0.1:{port} does not serve this call")
    assert said.endswith("pass the port of the server's `[server] listen`")


def test_a_server_of_another_ca_is_none_that_does_not_listen(tmp_path: Path) -> None:
    """Of a host with several addresses gRPC reports the last one, on which nothing may listen."""
    theirs = make_pki(tmp_path / "theirs")
    prepare_store(tmp_path / "store").close()
    make_pki(tmp_path / "ours")

    class Source:
        def current(self) -> Credentials:
            return credentials

        def enrol_again(self) -> bool:
            return False

    with secured_front(tmp_path / "store", tmp_path / "ours") as front:
        credentials = device_credentials(theirs, "d")
        for _ in range(4):
            said = error_of(f"localhost:{front.port}", Source())
            assert (
                "its certificate is not from a trusted CA, as after a change of its CA, not for this host name, or"
                in said
            ), said
            assert "nothing listens" not in said


class Unavailable(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """An error as gRPC raises it, with the details that it printed."""

    def __init__(self, details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._details, self._code = details, code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> None:
        return None


def _with_details(data: bytes) -> str:
    """What a device says of a server whose refusal has these bytes as its details."""

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("grpc-status-details-bin", data),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        raise AssertionError("abort raises")

    handler = grpc.method_handlers_generic_handler(
        "fleetdistill.wire.v1.DeviceService", {"NextAsk": grpc.unary_unary_rpc_method_handler(refuse)}
    )
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            return error_of(f"127.0.0.1:{port}")
        finally:
            server.stop(0).wait()


@pytest.mark.parametrize("details", ["no message", "another code", "another text", "a detail that is none"])
def test_details_that_cannot_be_read_are_link_errors(details: str) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    status = status_pb2.Status(code=invalid, message="no")
    if details == "another code":
        status.code = invalid + 1
    elif details == "another text":
        status.message = "yes"
    else:
        status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff" * 20)
    data = b"\xff" * 50 if details == "no message" else status.SerializeToString()
    assert "failed: INVALID_ARGUMENT, no" in _with_details(data)


TLS = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ("ipv4:192.0.2.1:1: connection attempt timed out before receiving SETTINGS frame", "does not answer as a gRPC"),
        ("last error: UNKNOWN: ipv4:192.0.2.1:1: Connection timed out", "the connection timed out"),
        ("last error: UNKNOWN: ipv4:192.0.2.1:1: tcp handshaker shutdown", "the connection timed out"),
        ("last error: UNKNOWN: ipv4:192.0.2.1:1: Timeout occurred: FD Shutdown", "the connection timed out"),
        ("ipv4:192.0.2.1:1: Handshake read failed (Endpoint closing)", "answers no TLS handshake; check the port"),
        ("ipv4:192.0.2.1:1: Handshake read failed (Socket closed)", "the TLS handshake failed"),
        (TLS + "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "the TLS handshake failed"),
        (TLS + "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED", "not from a trusted CA"),
        (TLS + "SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired"),
        ("Custom verification check failed with error: Hostname Verification Check failed.", "not for this host name"),
    ],
)
def test_details_that_take_a_network_to_provoke(details: str, says: str) -> None:
    with pytest.raises(LinkError, match=says) as caught, errors_of("fleet.example.org:1"):
        raise Unavailable(details)
    assert type(caught.value) is LinkError
    assert caught.value.__cause__ is None, "gRPC's own error would stand before it in an app's traceback"


@pytest.mark.long  # gRPC tries for 20 seconds
def test_a_connection_that_nobody_answers_times_out() -> None:
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(4):  # more than fit into the queue, so the kernel answers no further one
            other = sockets.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        link = sockets.enter_context(contextlib.closing(GrpcLink(server)))
        with pytest.raises(LinkError, match="the connection timed out"):
            link.next_ask(service_pb2.Identity(run="r", device="d"), 0.0)


def test_a_server_that_does_not_answer_in_time() -> None:
    with pytest.raises(LinkError, match="did not answer in time"), errors_of("fleet.example.org:1"):
        raise Unavailable("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)
