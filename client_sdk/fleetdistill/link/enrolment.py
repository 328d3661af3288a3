"""A device's certificate: got with a one-time token, renewed at two thirds of its life, kept in the state directory.

    tls/identity.pem   the device's own key, which never leaves it, and its certificate
    tls/ca.pem         whom the device trusts: at first the CA in the token, then what the server says with every
                       certificate, so that a change of the CA reaches the device with a renewal

The key is on the disk before it is used, so that a lost answer is asked for again and comes out the same. The token is
needed once; it can be removed when the device has its certificate.
"""

from __future__ import annotations

import base64
import binascii
import logging
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fleetdistill.errors import ConfigurationError, LinkError, RefusedError, StateError, WireError
from fleetdistill.link.credentials import AUTHORITIES, DEVICE_FOLDER, IDENTITY, Credentials, split, write_private
from fleetdistill.link.grpc_link import CALL_SECONDS, errors_of
from fleetdistill.state.disk import disk_errors
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc

logger = logging.getLogger(__name__)

PREFIX = "fd1-"
_SECRET_BYTES = 32


def write_token(token: enrolment_pb2.EnrolmentToken) -> str:
    """A token as the text that an operator hands out."""
    return PREFIX + base64.urlsafe_b64encode(token.SerializeToString()).decode().rstrip("=")


def read_token(given: str | Path) -> enrolment_pb2.EnrolmentToken:
    """Reads a token, or the file that holds one.

    Raises:
        ConfigurationError: It is none, or the file cannot be read. The message does not show it.
    """
    text = given if isinstance(given, str) and given.startswith(PREFIX) else _file(Path(given))
    words = text.split()
    try:
        if len(words) != 1 or not words[0].startswith(PREFIX):
            raise ValueError
        data = words[0].removeprefix(PREFIX)
        token = enrolment_pb2.EnrolmentToken.FromString(base64.b64decode(data + "=" * (-len(data) % 4), b"-_", True))
        if len(token.secret) != _SECRET_BYTES or not 1 <= token.port <= 65535 or not token.ca:
            raise ValueError
    except (ValueError, DecodeError, binascii.Error):
        raise ConfigurationError(
            f"the enrolment token is none: one word that begins with {PREFIX!r}, a whole line of what "
            "`fleetdistill enrol` printed, was expected"
        ) from None  # its parts are secret
    return token


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"the enrolment token cannot be read from the file {path}: {why}") from None


class Enrolment:
    """Keeps the credentials of one device valid; may be used from several threads.

    Args:
        server: `host:port` of the aggregation server.
        state_dir: The device's state directory.
        device: The device's id.
        token: A token or a file with one, needed until there is a certificate; None for none.

    Raises:
        ConfigurationError: The package `cryptography` is missing, or there is no certificate and no token to get one.
        StateError: The files in the state directory cannot be used.
    """

    def __init__(self, server: str, state_dir: Path, device: str, token: str | Path | None) -> None:
        self._x509 = _cryptography()
        self._server = server
        self._folder = state_dir / DEVICE_FOLDER
        self._device = device
        self._token = token
        self._lock = threading.Lock()
        self._due = self._ends = 0.0
        self._credentials, self._request = self._load()
        self._note_life()
        if not self._credentials.chain:
            self._read_token()  # here, to the face of whoever writes the app

    def current(self) -> Credentials:
        """Credentials that are valid now; gets or renews the certificate where that is due.

        The same object until the certificate changes.

        Raises:
            LinkError: The server is away, and there is no valid certificate.
            RefusedError: The certificate has expired and there is no token, or the server does not take it.
            StateError: The files in the state directory cannot be used.
            WireError: What the server gives is no certificate of this device's key.
        """
        with self._lock:
            now = time.time()
            if now >= self._ends:
                self._enrol()
            elif now >= self._due:
                self._renew()
            return self._credentials

    def _load(self) -> tuple[Credentials, bytes]:
        """Reads the state directory, after it has made the key of a new device; also a signing request of the key."""
        path, trusted = self._folder / IDENTITY, self._folder / AUTHORITIES
        with disk_errors(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not path.exists():
                write_private(path, self._x509.new_key())
            key, chain = split(path.read_bytes())
            authorities = trusted.read_bytes() if trusted.exists() else b""
        try:
            return Credentials(key, chain, authorities), self._x509.signing_request(key)
        except (ValueError, TypeError) as error:
            raise _damaged(path, "key") from error

    def _note_life(self) -> None:
        if not self._credentials.chain:
            return
        try:
            start, self._ends = self._x509.life(self._credentials.chain)
        except ValueError as error:
            raise _damaged(self._folder / IDENTITY, "certificate") from error
        self._due = self._ends - (self._ends - start) / 3

    def _read_token(self) -> enrolment_pb2.EnrolmentToken:
        if self._token is None:
            raise ConfigurationError(
                f"device {self._device!r} has no valid certificate: ask the operator for a token "
                "(`fleetdistill enrol`) and give it as Device(enrolment=...)"
            )
        return read_token(self._token)

    def _enrol(self) -> None:
        try:
            token = self._read_token()
        except ConfigurationError as error:  # it could be read before, or was not needed
            raise RefusedError(Code.EXPIRED, f"the certificate has expired; {error}") from error
        try:
            self._enrol_with(token)
        except RefusedError as refusal:
            if refusal.code != Code.BAD_TOKEN or not self._credentials.chain:
                raise
            raise RefusedError(Code.EXPIRED, f"the certificate has expired, and {refusal}") from refusal

    def _enrol_with(self, token: enrolment_pb2.EnrolmentToken) -> None:
        request = enrolment_pb2.EnrolRequest(secret=token.secret, device=self._device, signing_request=self._request)
        host = self._server.rpartition(":")[0]
        roots = ssl.DER_cert_to_PEM_cert(token.ca).encode()
        self._take(self._ask("Enrol", request, f"{host}:{token.port}", grpc.ssl_channel_credentials(roots)))
        logger.info("%s: enrolled", self._device)

    def _renew(self) -> None:
        """Asks for the next certificate. While the present one is valid, what goes wrong is tried again later."""
        request = enrolment_pb2.RenewRequest(signing_request=self._request)
        try:
            self._take(self._ask("Renew", request, self._server, self._credentials.channel()))
            logger.info("%s: the certificate is renewed", self._device)
        except (LinkError, RefusedError, StateError, WireError) as error:
            logger.warning("%s: the certificate is not renewed yet: %s", self._device, error)
            self._due = time.time() + (self._ends - time.time()) / 10

    def _ask(self, call: str, request: Any, server: str, credentials: Any) -> Any:
        with grpc.secure_channel(server, credentials) as channel, errors_of(server):
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            return getattr(stub, call)(request, timeout=CALL_SECONDS)

    def _take(self, response: Any) -> None:
        """Keeps a certificate and whom to trust; the certificate last, since it makes the device enrolled.

        Raises WireError for what could not be used: kept, it would lock the device out of its own directory.
        """
        fresh = Credentials(self._credentials.key, response.certificate, response.authorities)
        try:
            self._x509.check_fits(fresh.key, fresh.chain, fresh.authorities)
        except (ValueError, TypeError, self._x509.UnsupportedAlgorithm) as error:
            raise WireError(f"the server's certificate cannot be used: {error}; its operator has to mend it") from error
        with disk_errors(self._folder):
            write_private(self._folder / AUTHORITIES, fresh.authorities)
            write_private(self._folder / IDENTITY, fresh.key + fresh.chain)
        self._credentials = fresh
        self._note_life()


def _damaged(path: Path, what: str) -> StateError:
    return StateError(f"{path} is damaged: its {what} cannot be read; restore it, or use a fresh state directory")


def _cryptography() -> Any:
    try:
        from fleetdistill.link import x509
    except ImportError as error:
        raise ConfigurationError("TLS needs the package cryptography: pip install 'fleetdistill[tls]'") from error
    return x509
