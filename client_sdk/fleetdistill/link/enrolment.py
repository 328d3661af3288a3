"""A device's certificate: issued for a one-time token, renewed after two thirds of its lifetime.

    tls/identity.pem   the device's private key, which never leaves the device, and its certificate
    tls/ca.pem         the trusted CAs: first the CA in the token, then those that come with every certificate, so that
                       a change of the CA reaches the device with a renewal

The key is on the disk before it is used, so that a request whose response was lost can be repeated with the same key.
The token is needed once and can be removed when the device has its certificate.
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
from fleetdistill.link.base import reply_limit
from fleetdistill.link.credentials import (
    AUTHORITIES,
    DEVICE_FOLDER,
    IDENTITY,
    Credentials,
    has_certificate,
    split,
    write_private,
)
from fleetdistill.link.grpc_link import errors_of
from fleetdistill.state.disk import disk_errors
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc

logger = logging.getLogger(__name__)

PREFIX = "fd1-"
_SECRET_BYTES = 32


def write_token(token: enrolment_pb2.EnrolmentToken) -> str:
    """Returns a token as text for an operator to hand out."""
    return PREFIX + base64.urlsafe_b64encode(token.SerializeToString()).decode().rstrip("=")


def read_token(text_or_file: str | Path) -> enrolment_pb2.EnrolmentToken:
    """Reads a token, or a file with a token.

    Raises:
        ConfigurationError: The token is invalid, or the file cannot be read. The message does not contain the token.
    """
    text = (
        text_or_file
        if isinstance(text_or_file, str) and text_or_file.startswith(PREFIX)
        else _read_file(Path(text_or_file))
    )
    words = text.split()
    if len(words) > 1 and all(word.startswith(PREFIX) for word in words):
        raise ConfigurationError(
            f"these are {len(words)} enrolment tokens, one for each device; pass one of them, a line of the file"
        )
    try:
        if len(words) != 1 or not words[0].startswith(PREFIX):
            raise ValueError
        data = words[0].removeprefix(PREFIX)
        token = enrolment_pb2.EnrolmentToken.FromString(base64.b64decode(data + "=" * (-len(data) % 4), b"-_", True))
        if len(token.secret) != _SECRET_BYTES or not 1 <= token.port <= 65535 or not token.ca:
            raise ValueError
    except (ValueError, DecodeError, binascii.Error):
        raise ConfigurationError(
            f"the enrolment token is invalid: expected one word that begins with {PREFIX!r}, a complete line of the "
            "output of `fleetdistill enrol`"
        ) from None  # the token is secret
    return token


def token_for(text_or_file: str | Path, server: str) -> enrolment_pb2.EnrolmentToken:
    """Reads a token as `read_token`, for a device of a server.

    Raises:
        ConfigurationError: The token is invalid, or `server` is the enrolment port, which serves only the first
            certificate. The token is not spent.
    """
    token = read_token(text_or_file)
    if server.rpartition(":")[2] == str(token.port):
        raise ConfigurationError(
            f"server is {server!r}, which is the enrolment port; pass the port of the server's `[server] listen`. "
            "The device finds the enrolment port in its token"
        )
    return token


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise ConfigurationError(
            f"enrolment is neither a token, which begins with {PREFIX!r}, nor a file with one: {path}: {reason}"
        ) from None


class Enrolment:
    """Obtains and renews the certificate of one device. Thread-safe.

    Args:
        server: `"host:port"` of the aggregation server.
        state_dir: State directory of the device.
        device: Name of the device.
        token: Token, or file with a token; required until the device has a certificate.

    Raises:
        ConfigurationError: The package `cryptography` is missing, or there is neither a certificate nor a token.
        StateError: The files in the state directory cannot be used.
    """

    def __init__(self, server: str, state_dir: Path, device: str, token: str | Path | None) -> None:
        self._x509 = _cryptography()
        self._server = server
        self._folder = state_dir / DEVICE_FOLDER
        self._device = device
        self._token = token
        self._lock = threading.Lock()
        self._tried = False  # whether the server has decided about the token
        if not has_certificate(state_dir):
            self._read_token()  # an invalid token fails before a key is stored, which would require TLS from now on
        self._due = self._ends = 0.0
        self._credentials, self._request = self._load()
        self._read_validity()

    def current(self) -> Credentials:
        """Returns valid credentials; obtains or renews the certificate if necessary.

        Returns the same object until the certificate changes.

        Raises:
            LinkError: The server is unavailable, and there is no valid certificate.
            RefusedError: The certificate has expired and there is no token, or the server refuses the token.
            StateError: The files in the state directory cannot be used.
            WireError: The server's certificate does not belong to this device's key.
        """
        with self._lock:
            now = time.time()
            if now >= self._ends:
                self._enrol()
            elif now >= self._due:
                self._renew()
            return self._credentials

    def enrol_again(self) -> bool:
        """Uses the token, unless this was tried, for a server that may not admit the certificate any more.

        As after the end of a CA's rotation. The key stays. The token goes only to a server that its CA vouches for.

        Returns:
            Whether there is another certificate.
        """
        with self._lock:
            if self._token is None or self._tried:
                return False
            before = self._credentials.chain
            try:
                self._enrol_with(self._read_token())
            except LinkError:
                return False
            except (ConfigurationError, RefusedError, StateError, WireError) as error:
                self._tried = True
                logger.info("%s: the enrolment token was of no use: %s", self._device, error)
                return False
            return self._credentials.chain != before

    def _load(self) -> tuple[Credentials, bytes]:
        """Returns the stored credentials and a signing request for their key; makes the key of a new device."""
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

    def _read_validity(self) -> None:
        if not self._credentials.chain:
            return
        known = self._credentials
        try:
            start, self._ends = self._x509.life(known.chain)
        except ValueError as error:
            raise _damaged(self._folder / IDENTITY, "certificate") from error
        try:
            self._x509.check_fits(known.key, known.chain, known.authorities)
        except (ValueError, TypeError, self._x509.UnsupportedAlgorithm) as error:
            raise StateError(f"{self._folder}: {error}; restore {IDENTITY} and {AUTHORITIES} from a backup") from error
        self._due = self._ends - (self._ends - start) / 3

    def _read_token(self) -> enrolment_pb2.EnrolmentToken:
        if self._token is None:
            raise ConfigurationError(
                f"device {self._device!r} has no valid certificate: request a token from the operator "
                "(`fleetdistill enrol`) and pass it as Server(enrolment=...)"
            )
        return token_for(self._token, self._server)

    def _enrol(self) -> None:
        try:
            token = self._read_token()
        except ConfigurationError as error:  # the token was removed, or never given
            raise RefusedError(Code.EXPIRED, f"the certificate has expired; {error}") from error
        try:
            self._enrol_with(token)
        except RefusedError as refusal:
            if refusal.code != Code.BAD_TOKEN or not self._credentials.chain:
                raise
            raise RefusedError(Code.EXPIRED, f"the certificate has expired; {refusal}") from refusal

    def _enrol_with(self, token: enrolment_pb2.EnrolmentToken) -> None:
        request = enrolment_pb2.EnrolRequest(secret=token.secret, device=self._device, signing_request=self._request)
        host = self._server.rpartition(":")[0]
        roots = ssl.DER_cert_to_PEM_cert(token.ca).encode()
        self._save(self._call("Enrol", request, f"{host}:{token.port}", grpc.ssl_channel_credentials(roots)))
        self._tried = True
        logger.info("%s: enrolled", self._device)

    def _renew(self) -> None:
        """Requests a new certificate; after an error, retries later while the current certificate is valid."""
        request = enrolment_pb2.RenewRequest(signing_request=self._request)
        try:
            self._save(self._call("Renew", request, self._server, self._credentials.channel()))
            logger.info("%s: certificate renewed", self._device)
        except (LinkError, RefusedError, StateError, WireError) as error:
            logger.warning("%s: the certificate could not be renewed and will be tried again: %s", self._device, error)
            self._due = time.time() + (self._ends - time.time()) / 10

    def _call(self, call: str, request: Any, server: str, credentials: Any) -> Any:
        named = f"{server} (the enrolment port that the token names)" if call == "Enrol" else server
        with grpc.secure_channel(server, credentials) as channel, errors_of(named):
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            return getattr(stub, call)(request, timeout=reply_limit())

    def _save(self, response: Any) -> None:
        """Saves the trusted CAs, then the certificate, which makes the device enrolled.

        Raises WireError for an unusable certificate: if saved, it would lock the device out.
        """
        fresh = Credentials(self._credentials.key, response.certificate, response.authorities)
        try:
            self._x509.check_fits(fresh.key, fresh.chain, fresh.authorities)
        except (ValueError, TypeError, self._x509.UnsupportedAlgorithm) as error:
            raise WireError(
                f"the server's certificate cannot be used: {error}; the server's operator must fix it"
            ) from error
        with disk_errors(self._folder):
            write_private(self._folder / AUTHORITIES, fresh.authorities)
            write_private(self._folder / IDENTITY, fresh.key + fresh.chain)
        self._credentials = fresh
        self._read_validity()


def _damaged(path: Path, what: str) -> StateError:
    return StateError(f"{path} is damaged: its {what} cannot be read; restore the file, or use a new state directory")


def _cryptography() -> Any:
    try:
        from fleetdistill.link import x509
    except ImportError as error:
        raise ConfigurationError("TLS needs the package cryptography: pip install 'fleetdistill[tls]'") from error
    return x509
