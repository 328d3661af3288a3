"""Certificates: the role and name in a certificate, and the validation of signing requests."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.wire.codes import Code

URI_SCHEME = "fleetdistill"
_MAX_REQUEST = 4096
_CACHED_HOLDERS = 20_000
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
"""A host name; its last part is not a number, so that it is no mistyped address."""
_HOST_CHARACTERS = 253


class Role(StrEnum):
    """Role of a certificate's holder."""

    DEVICE = "device"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True)
class Holder:
    """Holder of a certificate.

    Attributes:
        role, name: Role and name in the certificate's URI.
        run: The run that a device is restricted to; empty for all runs.
        serial: Serial number of the certificate, in hex.
        expires_at: End of validity, in seconds since 1970.
        public_key: Fingerprint of the public key; see `fingerprint`.
        issuer: Name of the CA that signed the certificate.
    """

    role: Role
    name: str
    run: str = ""
    serial: str = ""
    expires_at: float = math.inf
    public_key: bytes = b""
    issuer: str = ""

    @property
    def subjects(self) -> tuple[str, str]:
        """Subjects whose revocation makes the certificate invalid: its holder and its serial number."""
        return f"{self.role}:{self.name}", f"serial:{self.serial}"


@dataclass(frozen=True)
class Issued:
    """A newly signed certificate. Times are in seconds since 1970; `public_key` is a `fingerprint`."""

    pem: bytes
    serial: str
    public_key: bytes
    issued_at: float
    expires_at: float


@lru_cache(maxsize=_CACHED_HOLDERS)
def holder_of(pem: bytes) -> Holder | None:
    """Returns the holder of a certificate whose signature TLS has verified; None if its role is unknown."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    uris = dict(
        uri.split(":", 2)[1:] for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if _ours(uri)
    )
    roles = [Role(word) for word in uris if word in set(Role)]
    if len(roles) != 1:
        return None
    key = certificate.public_key()
    return Holder(
        role=roles[0],
        name=uris[roles[0]],
        run=uris.get("run", ""),
        serial=f"{certificate.serial_number:x}",
        expires_at=certificate.not_valid_after_utc.timestamp(),
        public_key=fingerprint(key) if isinstance(key, ec.EllipticCurvePublicKey) else b"",
        issuer=certificate.issuer.rfc4514_string(),
    )


def _ours(uri: str) -> bool:
    return uri.startswith(f"{URI_SCHEME}:") and uri.count(":") == 2


def check_hosts(names: Sequence[str]) -> None:
    """Raises ConfigurationError if a name is not a valid host name or address for a server certificate."""
    for name in names:
        general_name(name)


def read_request(der: bytes) -> ec.EllipticCurvePublicKey:
    """Returns the public key in a signing request, after verifying that the sender has the private key.

    Raises:
        RefusedError: The request is malformed, or its key is not ECDSA P-256.
    """
    try:
        if len(der) > _MAX_REQUEST:
            raise ValueError(f"the size is {len(der)} bytes, must be at most {_MAX_REQUEST}")
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("the key is not ECDSA P-256")
        if not request.is_signature_valid:
            raise ValueError("the signature does not match the key")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise RefusedError(Code.BAD_MESSAGE, f"the signing request is invalid: {error}") from error
    return key


def fingerprint(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns the SHA-256 digest of a public key."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _HOST.fullmatch(name) or len(name) > _HOST_CHARACTERS:
        raise ConfigurationError(
            f"--names has {name!r}, which is not a host name or address; expected host names and IP addresses, "
            "separated by commas, without scheme, port or path, and in ASCII (xn--...)"
        )
    return x509.DNSName(name)
