"""TLS credentials in a directory: a key, its certificate, and the trusted CAs.

    identity.pem   the private key and its certificate chain; mode 0600, replaced atomically
    ca.pem         the trusted CA certificates

A device stores both in the folder `tls` of its state directory; operators get them from `fleetdistill pki issue`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import rename_durably

__all__ = ["AUTHORITIES", "DEVICE_FOLDER", "IDENTITY", "write_private"]

IDENTITY = "identity.pem"
AUTHORITIES = "ca.pem"
DEVICE_FOLDER = "tls"
_KEY = re.compile(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----.*?-----END (?:\w+ )?PRIVATE KEY-----\n?", re.DOTALL)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True)
class Credentials:
    """Credentials of a TLS channel, in PEM. The representation does not show the key.

    Attributes:
        key: Private key.
        chain: Certificate chain; empty before a device is enrolled.
        authorities: Trusted CA certificates.
    """

    key: bytes
    chain: bytes
    authorities: bytes

    def __repr__(self) -> str:
        return f"Credentials({len(self.chain)} bytes of certificates, key not shown)"

    def channel(self) -> Any:
        """Returns the credentials of a gRPC channel."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


def is_enrolled(state_dir: Path) -> bool:
    """Returns whether a state directory has a device's key; such a device uses TLS only."""
    return (state_dir / DEVICE_FOLDER / IDENTITY).exists()


def has_certificate(state_dir: Path) -> bool:
    """Returns whether a state directory has a device's certificate, so that no token is required."""
    path = state_dir / DEVICE_FOLDER / IDENTITY
    with disk_errors(state_dir):
        return path.exists() and _CERTIFICATE.search(path.read_bytes()) is not None


def split(pem: bytes) -> tuple[bytes, bytes]:
    """Returns the private key and the certificates in a PEM file."""
    return b"".join(_KEY.findall(pem)), b"".join(_CERTIFICATE.findall(pem))


def load_credentials(directory: Path) -> Credentials:
    """Loads the credentials in a directory.

    Raises:
        ConfigurationError: A file is missing, or has no key or certificate.
    """
    try:
        key, chain = split((directory / IDENTITY).read_bytes())
        authorities = (directory / AUTHORITIES).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the identity in {directory} cannot be read: {in_words(error)}") from error
    if not (key and chain and _CERTIFICATE.search(authorities)):
        raise ConfigurationError(
            f"{directory}: {IDENTITY} must contain a key and a certificate, and {AUTHORITIES} the certificate of a CA"
        )
    return Credentials(key, chain, authorities)


def write_private(path: Path, data: bytes) -> None:
    """Writes a file with mode 0600 atomically and durably. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # a file left by a crash might be readable by others
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    rename_durably(temporary, path)
