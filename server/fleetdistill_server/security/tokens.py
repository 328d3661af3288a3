"""One-time enrolment tokens, the certificates issued for them, and the port that devices with tokens connect to.

The port is saved in the store's directory for the commands that create tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.link.enrolment import write_token
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import enrolment_pb2
from fleetdistill_server.security.certificates import Holder, Issued, Role, fingerprint, read_request
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import check_not_revoked
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.records import Certificate, Token
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store

__all__ = ["enrol_port_for_tokens", "state_of"]

MAX_TOKENS = 10_000
MAX_SECONDS = 366 * 86_400.0
_SECRET_BYTES = 32
_PORT_FILE = "enrol-port"


def create_tokens(
    store: Store, authority: Authority, port: int, count: int, seconds: float, run: str, devices: Sequence[str] = ()
) -> list[str]:
    """Creates enrolment tokens and stores the SHA-256 of their secrets.

    Args:
        store: The server's store.
        authority: CA whose certificate is included in the tokens.
        port: Port for enrolment.
        count: Number of tokens, 1 to 10,000.
        seconds: Validity in seconds, above 0 and at most a year.
        run: Run that the devices are restricted to; empty for all runs.
        devices: Device ids; if given, one token is created for each id, and `count` is ignored.

    Returns:
        The tokens.

    Raises:
        ConfigurationError: A value is out of range, or the run does not exist.
    """
    count = len(devices) or count
    if not 1 <= count <= MAX_TOKENS:
        raise ConfigurationError(f"count is {count}, must be 1 to {MAX_TOKENS}")
    for device in devices:
        if not is_name(device):
            raise ConfigurationError(f"device is {device[:70]!r}, must be {NAME_RULE}")
        check_not_revoked(store, Role.DEVICE, device)
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigurationError(f"the validity is {seconds:g} seconds, must be above 0 and at most a year")
    if run and not is_name(run):
        raise ConfigurationError(f"run is {run[:70]!r}, must be {NAME_RULE}")
    if run and store.runs.get(run) is None:
        raise ConfigurationError(
            f"{no_such_run(run, store.runs.names())}. Create it with "
            "`fleetdistill runs create`, or serve its run.toml once, before you create its tokens"
        )
    made = [secrets.token_bytes(_SECRET_BYTES) for _ in range(count)]
    hashes = [sha256(secret).digest() for secret in made]
    store.credentials.add_tokens(dict(zip(hashes, devices or [""] * count, strict=True)), run, time.time() + seconds)
    ca = authority.der
    return [write_token(enrolment_pb2.EnrolmentToken(secret=secret, ca=ca, port=port)) for secret in made]


def token_bytes(authority: Authority) -> int:
    """Returns the size in bytes of one token in a response, including its framing."""
    return len(write_token(enrolment_pb2.EnrolmentToken(secret=b"x" * _SECRET_BYTES, ca=authority.der, port=1))) + 8


def token_of(store: Store, secret: bytes) -> Token | None:
    """Returns the token with a secret, in whatever state it is; None if the store knows none."""
    return store.credentials.token(sha256(secret).digest())


def state_of(token: Token, now: float) -> str:
    """Returns the state of a token: used, revoked, expired or open."""
    if token.device is not None:
        return "used"
    if token.is_revoked:
        return "revoked"
    return "expired" if token.expires_at < now else "open"


@dataclass(frozen=True)
class EnrolmentApi:
    """Issues certificates to devices.

    Attributes:
        directory: Directory of the PKI. It is read on every call, so that a CA rotation needs no restart.
        days: Validity of a device's certificate in days.
    """

    directory: Path
    days: float

    def check_token(self, store: Store, secret: bytes) -> None:
        """Raises RefusedError unless the secret belongs to a valid token; called before parsing the request."""
        _valid(token_of(store, secret))

    def enrol(self, store: Store, secret: bytes, device: str, request: bytes) -> bytes:
        """Marks a token as used and returns the device's certificate, which is stored in the same transaction.

        A repeated call with the same token, key and id returns the same certificate until the token expires.

        Raises:
            RefusedError: The token is not valid, or the id is malformed, revoked, or in use with another key.
        """
        key = read_request(request)
        token_hash = sha256(secret).digest()
        token = _valid(store.credentials.token(token_hash))
        if token.device is not None:
            return _reissue(store, token, device, key)
        if token.for_device not in ("", device):
            text = f"the enrolment token is not valid for device id {device[:64]!r}"
            raise RefusedError(Code.BAD_TOKEN, f"{text}; pass the id that it was created for as device_id")
        _check_id(store, device, key)
        issued = Authority(self.directory).sign_device(key, device, token.run, self.days)
        store.credentials.use_token(token_hash, _record(issued, device, token.run))
        return issued.pem

    def renew(self, store: Store, holder: Holder, request: bytes) -> bytes:
        """Returns a new certificate, or the current one if more than half of its validity is left.

        Raises:
            RefusedError: The request is invalid, or its key is not the device's key.
        """
        key = read_request(request)
        if fingerprint(key) != holder.public_key:
            text = f"device {holder.name!r} must renew with its own key; a new key requires a new id and token"
            raise RefusedError(Code.NOT_ALLOWED, text)
        for newest in store.credentials.certificates(holder.name)[-1:]:
            if time.time() < (newest.expires_at + newest.issued_at) / 2 and newest.run == holder.run:
                return newest.pem
        issued = Authority(self.directory).sign_device(key, holder.name, holder.run, self.days)
        store.credentials.add_certificate(_record(issued, holder.name, holder.run))
        return issued.pem


def _valid(token: Token | None) -> Token:
    state = "unknown" if token is None else state_of(token, time.time())
    over = token is not None and (token.is_revoked or token.expires_at < time.time())
    if token is None or over:
        raise RefusedError(Code.BAD_TOKEN, f"the enrolment token is {state}; ask the operator for a new token")
    return token


def _reissue(store: Store, token: Token, device: str, key: ec.EllipticCurvePublicKey) -> bytes:
    certificate = store.credentials.certificate(token.serial or "")
    same = certificate is not None and (certificate.device, certificate.public_key) == (device, fingerprint(key))
    if certificate is None or not same or certificate.expires_at < time.time():
        text = "the enrolment token is used; the device that used it continues with its state_dir"
        raise RefusedError(Code.BAD_TOKEN, f"{text}, another one needs a new token from the operator")
    return certificate.pem


def _check_id(store: Store, device: str, key: ec.EllipticCurvePublicKey) -> None:
    """Raises RefusedError if the id is invalid, revoked, or already enrolled with another key."""
    if not is_name(device):
        text = f"device id is {device[:70]!r}, must be {NAME_RULE}"
        raise RefusedError(Code.BAD_IDENTITY, text)
    if store.credentials.is_revoked(f"{Role.DEVICE}:{device}", ""):
        raise RefusedError(Code.REVOKED, f"device {device!r} was revoked; enrol it with another id")
    known = {certificate.public_key for certificate in store.credentials.certificates(device)}
    if known and fingerprint(key) not in known:
        text = f"device id {device!r} is enrolled with another key; choose another id"
        raise RefusedError(Code.BAD_IDENTITY, f"{text}, or restore the device's state directory")


def _record(issued: Issued, device: str, run: str) -> Certificate:
    return Certificate(device=device, run=run, **asdict(issued))


def save_enrol_port(store: Path, port: int) -> None:
    """Saves the enrolment port of the store's front. Raises StoreError."""
    fresh = store / f"{_PORT_FILE}.new"
    with disk_errors(f"saving the enrolment port in {store}"):
        fresh.write_text(str(port))
        fresh.replace(store / _PORT_FILE)


def load_enrol_port(store: Path) -> int | None:
    """Returns the last saved enrolment port of a store, or None. Raises StoreError."""
    path = store / _PORT_FILE
    with disk_errors(f"reading {path}"):
        text = path.read_text() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def enrol_port_for_tokens(store: Path) -> int:
    """Returns the enrolment port that devices with new tokens connect to; they cannot discover it otherwise.

    Raises:
        ConfigurationError: No server has started with the store yet.
        StoreError: The port cannot be read.
    """
    port = load_enrol_port(store)
    if port is None:
        raise ConfigurationError(
            f"no server has started with the store {store} yet, so the enrolment port for the tokens is unknown; start "
            "the server first, or set --enrol-port to the port of [server] enrol_listen"
        )
    return port
