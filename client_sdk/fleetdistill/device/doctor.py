"""`fleetdistill doctor --state DIR`: looks at a device from where it stands, without changing anything.

A check yields findings in words; an error of the SDK within a check becomes a finding too, because its message says
what is wrong and what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from platform import python_version

import grpc

from fleetdistill.device.inspection import Inspection, inspect
from fleetdistill.errors import ConfigurationError, FleetDistillError, LinkError, StateError, in_words
from fleetdistill.link.credentials import DEVICE_FOLDER, IDENTITY, is_enrolled, load_credentials
from fleetdistill.link.grpc_link import errors_of
from fleetdistill.link.tls_probe import accepts_tls
from fleetdistill.printable import printable
from fleetdistill.state.disk import free_bytes
from fleetdistill.state.durable import open_to_others
from fleetdistill.state.files import Files
from fleetdistill.state.format import check_format, json_object
from fleetdistill.state.own_files import check_can_be_state, own_files
from fleetdistill.version import VERSION

OK, WARNING, ERROR = "ok", "warning", "error"
DAY_SECONDS = 86_400.0
_SECONDS = 5.0
_ROOM_BYTES = 16 << 20
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING); the SDK does not need grpcio-health-checking
Clock = Callable[[], float]


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        check: Name of the check.
        level: `ok`, `warning` or `error`.
        text: What was found and, unless all is well, what to do.
    """

    check: str
    level: str
    text: str

    def line(self) -> str:
        """Returns the finding as one line without control characters."""
        return printable(f"{self.level:<8} {self.check}: {self.text}")


def findings(name: str, check: Callable[[], Iterable[tuple[str, str]]]) -> list[Finding]:
    """Runs a check that yields levels and texts; an error of fleetdistill or of a file becomes a finding."""
    result = []
    try:
        for level, text in check():
            result.append(Finding(name, level, text))
    except FleetDistillError as error:
        result.append(Finding(name, ERROR, str(error)))
    except OSError as error:
        result.append(Finding(name, ERROR, in_words(error)))
    return result


def examine(state_dir: Path, server: str | None = None, clock: Clock = time.time) -> list[Finding]:
    """Examines a device: its packages, its state directory, and whether it can reach its server.

    Args:
        state_dir: State directory of the device.
        server: `"host:port"` of the server; None for the one that the app used last.
        clock: Clock of this machine, Unix seconds.
    """
    result = findings("versions", lambda: [(OK, versions(("grpcio", "numpy", "torch", "onnxruntime", "cryptography")))])
    result += findings("state directory", lambda: _state(state_dir))
    if any(item.level == ERROR and item.check == "state directory" for item in result) and server is None:
        return result
    result += findings("owner", lambda: _owner(state_dir))
    result += findings("disk", lambda: _disk(state_dir))
    result += findings("certificate", lambda: _certificate(state_dir, clock()))
    address = server or _last_server(state_dir)
    if not address:
        unknown = "not checked, because its address is unknown; give --server HOST:PORT"
        return [*result, Finding("server", WARNING, unknown)]
    return [*result, *findings("server", lambda: _server(state_dir, address, clock()))]


def versions(packages: Sequence[str]) -> str:
    """Returns the versions of fleetdistill, Python and packages as one text."""
    return ", ".join([f"fleetdistill {VERSION}", f"Python {python_version()}", *map(_version, packages)])


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} not installed"


def _state(directory: Path) -> Iterator[tuple[str, str]]:
    try:
        result = inspect(directory)
    except StateError:
        check_can_be_state(directory)  # says more about a directory with foreign files
        raise
    _check_format(directory)
    for damage in result.damage:
        yield ERROR, damage
    for name in result.set_aside:
        yield WARNING, f"{directory / name} was damaged and put aside; it can be deleted once you have looked at it"
    if result.erasing:
        yield WARNING, f"an erasure of {directory} has begun; the next start of the device completes it"
    if not result.damage:
        yield OK, _describe(directory, result)


def _check_format(directory: Path) -> None:
    path = directory / "device.json"
    data = Files(directory).load("device.json")
    if data is not None:
        check_format(path, json_object(path, data))


def _describe(directory: Path, found: Inspection) -> str:
    waiting = ", an answer waits to be sent" if found.waiting else ""
    return f"{directory} is intact: device {found.device!r}, run {found.run!r}, round {found.last_round}{waiting}"


def _owner(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields files that this user cannot use, or that others can read although they have a key."""
    files = [directory, *own_files(directory)]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    own = getattr(os, "geteuid", lambda: -1)()
    foreign = [path for path in files if own not in (-1, path.stat().st_uid)]
    key = directory / DEVICE_FOLDER / IDENTITY
    if closed:
        yield ERROR, f"this user cannot read and write {closed[0]}; run the app, and this command, as the owner"
    elif foreign:
        yield WARNING, f"{foreign[0]} belongs to another user than this command's; run it as the user of the app"
    if own != -1 and key.exists() and stat.S_IMODE(key.stat().st_mode) & 0o077:
        yield ERROR, f"other users can read the private key in {key}; run `chmod 600 {key}`"
    elif text := open_to_others(directory):
        yield WARNING, text
    elif not closed and not foreign:
        yield OK, "all files belong to this user"


def _disk(directory: Path) -> Iterator[tuple[str, str]]:
    """Compares the free space with another copy of what an answer writes; earlier versions are only links to it."""
    free = free_bytes(directory)
    versions = directory / "versions"
    files = [path.stat() for path in own_files(directory) if versions not in path.parents]
    wanted = sum({file.st_ino: file.st_size for file in files}.values()) + _ROOM_BYTES
    text = f"{_megabytes(free)} are free at {directory}"
    if free < wanted:
        yield ERROR, f"{text}, but the next answer may need {_megabytes(wanted)}; free some space"
    elif (directory / "state.safetensors").exists():
        yield OK, f"{text}; the next answer may need {_megabytes(wanted)}"
    else:
        yield OK, f"{text}; what an answer needs is known after the first one, several times the model's size"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _certificate(directory: Path, now: float) -> Iterator[tuple[str, str]]:
    if not is_enrolled(directory):
        yield OK, "none; the device uses plain text"
        return
    credentials = load_credentials(directory / DEVICE_FOLDER)
    try:
        from fleetdistill.link.x509 import check_fits, life
    except ImportError as error:
        raise ConfigurationError("TLS needs cryptography; install it: pip install 'fleetdistill[tls]'") from error
    try:
        check_fits(credentials.key, credentials.chain, credentials.authorities)
        begins, ends = life(credentials.chain)
    except ValueError as error:
        raise StateError(f"{directory / DEVICE_FOLDER}: {error}; enrol the device again with a new token") from error
    yield from certificate_findings("the device's certificate", begins, ends, now, "enrol the device with a new token")


def certificate_findings(
    what: str, begins: float, ends: float, now: float, todo: str, soon_seconds: float = 0.0
) -> Iterator[tuple[str, str]]:
    """Yields what the validity of a certificate says about it, or about this machine's clock.

    Args:
        what: The certificate in words.
        begins, ends: Its validity, Unix seconds.
        now: This machine's time, Unix seconds.
        todo: What replaces the certificate.
        soon_seconds: Time before its end from which it should be replaced; 0 for the last tenth of its validity.
    """
    if now < begins:
        yield ERROR, f"{what} is valid from {_when(begins)}, but it is {_when(now)} here; set this machine's clock"
    elif now >= ends:
        yield ERROR, f"{what} expired on {_when(ends)}, and it is {_when(now)} here; {todo}, or set a wrong clock right"
    elif ends - now < (soon_seconds or (ends - begins) / 10):
        yield WARNING, f"{what} expires on {_when(ends)}; {todo}"
    else:
        yield OK, f"{what} is valid until {_when(ends)}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _last_server(directory: Path) -> str:
    try:
        path = directory / "device.json"
        return str(json_object(path, Files(directory).load("device.json") or b"{}").get("server", ""))
    except StateError:
        return ""


def _server(directory: Path, server: str, now: float) -> Iterator[tuple[str, str]]:
    """Goes the way of a call step by step, and stops at the first step that fails."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--server is {server!r}, expected host:port, such as 127.0.0.1:50051")
    try:
        result = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield ERROR, f"the name {host!r} cannot be resolved: {in_words(error)}; check the name and this machine's DNS"
        return
    yield OK, f"{host} is {result[0][4][0]}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
    except OSError as error:
        yield ERROR, f"nobody answers on {server}: {in_words(error)}; check the port, the firewall, and the server"
        return
    yield OK, f"{server} accepts connections"
    yield from _handshake(directory, server, now)


def _handshake(directory: Path, server: str, now: float) -> Iterator[tuple[str, str]]:
    if not is_enrolled(directory):
        if accepts_tls(server):
            yield ERROR, f"{server} requires TLS, but this device has no certificate; enrol it with a token"
            return
        with grpc.insecure_channel(server) as channel:
            yield from _health(channel, server, "check that the port is the server's")
        return
    credentials = load_credentials(directory / DEVICE_FOLDER)
    try:
        yield from _certificate_of(server, directory / DEVICE_FOLDER / IDENTITY, credentials.authorities, now)
    except ssl.SSLCertVerificationError as error:
        yield ERROR, f"{server} is not trusted: {error.verify_message}; {_todo(error, server)}"
        return
    except (OSError, ValueError) as error:
        why = in_words(error) if isinstance(error, OSError) else error
        yield ERROR, f"the TLS handshake with {server} failed: {why}; it may serve plain text, or be another program"
        return
    with grpc.secure_channel(server, credentials.channel()) as channel:
        todo = (
            "it may not admit this device's certificate any more, as after a change of its CA: enrol the device again "
        )
        yield from _health(channel, server, f"{todo}with a new token; or the port is not the server's")


def _certificate_of(server: str, identity: Path, authorities: bytes, now: float) -> Iterator[tuple[str, str]]:
    host, _, port = server.rpartition(":")
    context = ssl.create_default_context(cadata=authorities.decode())
    context.load_cert_chain(identity)
    context.set_alpn_protocols(["h2"])
    name = host.strip("[]")
    with (
        socket.create_connection((name, int(port)), timeout=_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=name) as wrapped,
    ):
        shown = wrapped.getpeercert() or {}
    begins, ends = (ssl.cert_time_to_seconds(str(shown[key])) for key in ("notBefore", "notAfter"))
    yield from certificate_findings("the server's certificate", begins, ends, now, "tell the operator of the server")


def _todo(error: ssl.SSLCertVerificationError, server: str) -> str:
    if error.verify_code in (62, 64):  # host name, IP address
        return (
            "its certificate has other names; use one of them, or have the operator run `fleetdistill pki renew-server "
            f"--names` with those and {server.rpartition(':')[0]}"
        )
    if error.verify_code in (9, 10):  # not yet valid, expired
        return "set this machine's clock if it is wrong, or have the operator run `fleetdistill pki renew-server`"
    return "it may be another server; if its CA was replaced, enrol the device again with a new token"


def _health(channel: grpc.Channel, server: str, todo: str) -> Iterator[tuple[str, str]]:
    call = channel.unary_unary(_HEALTH, lambda request: request, lambda reply: reply)
    try:
        with errors_of(server):
            status = call(b"", timeout=_SECONDS)
    except LinkError as error:
        yield ERROR, f"{error}: it accepts connections, but does not answer calls; {todo}"
        return
    if status == _SERVING:
        yield OK, f"{server} replies and is serving (protocol v1)"
    else:
        yield WARNING, f"{server} replies, but is not ready to serve; look at it again in a minute"


def main(arguments: Sequence[str]) -> int:
    """Runs `fleetdistill doctor --state ...`, which needs only the SDK; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fleetdistill doctor", description="Finds out what is wrong with a device.")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="Device(state_dir=...)")
    parser.add_argument("--server", metavar="HOST:PORT", help="server of the run; by default the app's last one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    return show(examine(options.state, options.server), as_json=options.json)


def show(found: Sequence[Finding], *, as_json: bool) -> int:
    """Prints findings; returns the exit status, 1 if there is an error."""
    if as_json:
        print(json.dumps([asdict(item) for item in found], indent=1))
    else:
        print("\n".join(item.line() for item in found))
    sys.stdout.flush()
    return int(any(item.level == ERROR for item in found))
