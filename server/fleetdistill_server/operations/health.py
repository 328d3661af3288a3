"""Asks a server for its health, as a container's health check or a monitor does."""

from __future__ import annotations

import argparse
import re
import socket
import ssl
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleetdistill.errors import ConfigurationError, FleetDistillError, LinkError, RefusedError, in_words
from fleetdistill.link.credentials import load_credentials
from fleetdistill.link.grpc_link import errors_of
from fleetdistill.link.tls_probe import accepts_tls
from fleetdistill.printable import printable
from fleetdistill.wire.codes import Code
from fleetdistill_server.texts import HEALTH_PROBLEM

HEALTH_SECONDS = 5.0
"""Timeout of the call; shorter than the interval of every health check in deploy/."""
_PARTS = {
    "": "it refuses calls",
    "fleetdistill.database": "its database or disk does not answer, so it refuses calls",
    "fleetdistill.engine": "an engine hangs or is missing",
    "fleetdistill.disk": "a disk limit is reached, so it refuses uploads",
}
"""What it means that a part of a server does not serve, by name in the health service."""
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----")


def check_health(server: str, *, ca: Path | None = None, identity: Path | None = None, service: str = "") -> str:
    """Asks a server for its health and returns the answer in words.

    Args:
        server: host:port, in plain text unless `ca` or `identity` is given.
        ca: File with the CA's certificates, for the enrolment port. No caller without a certificate may ask for the
            health there, but the refusal shows that the server replies, and its certificate is verified.
        identity: Directory of an operator or viewer, for the port of [server] listen.
        service: Name in the health service, such as fleetdistill.engine; empty for the whole server.

    Raises:
        ConfigurationError: `ca` or `identity` cannot be read, or the arguments do not fit together.
        LinkError: The server cannot be reached, is not the CA's, or does not serve.
        RefusedError: The holder of the identity may not make the call.
    """
    if not re.fullmatch(r".+:\d+", server):
        raise ConfigurationError(f"{server!r} has no port; give host:port, such as {server or 'localhost'}:50051")
    if ca is not None and (identity is not None or service):
        raise ConfigurationError("--ca cannot be combined with --identity or --service, which need the other port")
    try:
        with _channel(server, ca, identity) as channel, errors_of(server, identity):
            return _said(channel, server, [service] if service else _PARTS)
    except RefusedError as refusal:
        if ca is None or refusal.code != Code.NOT_ALLOWED:
            raise
        return "replies"
    except LinkError as error:
        if ca is None and identity is None and accepts_tls(server):
            raise LinkError(
                f"server {server} requires TLS: give --identity with your directory for the main port, or "
                "--ca with the server's ca.pem for the enrolment port ([server] enrol_listen)"
            ) from error
        if ca is None or not _wants_certificate(server, ca):
            raise
        raise LinkError(
            f"server {server} has a certificate of this CA, but this is its main port, which wants one of you too: "
            "give --identity with your directory, or --ca with the enrolment port ([server] enrol_listen)"
        ) from error


def _said(channel: Any, server: str, services: Iterable[str]) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    wrong = list[str]()
    for service in services:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer, call = stub.Check.with_call(request, timeout=HEALTH_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            raise LinkError(f"server {server} has no service {service!r}; try fleetdistill.engine") from error
        status = answer.status
        told = dict(call.trailing_metadata() or ()).get(HEALTH_PROBLEM, b"")
        if status != health_pb2.HealthCheckResponse.SERVING:
            text = told.decode(errors="replace") or _PARTS.get(service)
            known = health_pb2.HealthCheckResponse.ServingStatus.items()
            name = next((name for name, number in known if number == status), f"in the unknown state {status}")
            wrong.append(f"{service or 'the front'} is {name}" + (f", {text}" if text else ""))
    if wrong:
        raise LinkError(f"server {server}: {'; '.join(wrong)}. See its log, and `runs list`")
    return "serves"


def _channel(server: str, ca: Path | None, identity: Path | None) -> Any:
    if identity is not None:
        return grpc.secure_channel(server, load_credentials(identity).channel())
    if ca is not None:
        return grpc.secure_channel(server, grpc.ssl_channel_credentials(_authorities(ca)))
    return grpc.insecure_channel(server)


def _wants_certificate(server: str, ca: Path) -> bool:
    """Returns whether a server that is the CA's hangs up after the handshake, as the port for identities does."""
    host, _, port = server.rpartition(":")
    name = host.strip("[]")
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((name, int(port)), HEALTH_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=name) as wrapped,
        ):
            return not wrapped.recv(1)
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        return False


def _authorities(path: Path) -> bytes:
    try:
        result = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--ca {path} cannot be read: {in_words(error)}") from error
    if not _CERTIFICATE.search(result):
        raise ConfigurationError(f"--ca {path} contains no certificate; name the ca.pem of the server's PKI")
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs `fleetdistill health` where the extra `server` is not installed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fleetdistill health", description="Exits with 0 if a server replies.")
    parser.add_argument("server", metavar="HOST:PORT", help="server to ask")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="the server's ca.pem, for its enrolment port")
    parser.add_argument("--identity", type=Path, metavar="DIR", help="directory with your identity, for its main port")
    parser.add_argument("--service", default="", metavar="NAME", help="service to ask for, such as fleetdistill.engine")
    options = parser.parse_args(arguments)
    try:
        print(
            options.server,
            check_health(options.server, ca=options.ca, identity=options.identity, service=options.service),
        )
    except FleetDistillError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0
