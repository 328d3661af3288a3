"""Who one side is on TLS: a key, its certificate, and the CAs that it trusts, in a directory.

    identity.pem   the private key, then its certificate and what leads from that to a CA; 0600, replaced whole
    ca.pem         the CA certificates to trust

A device keeps both in the folder `tls` of its state directory, a person gets them from `fleetdistill pki issue`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.state.durable import rename_durably

IDENTITY = "identity.pem"
AUTHORITIES = "ca.pem"
DEVICE_FOLDER = "tls"
_KEY = re.compile(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----.*?-----END (?:\w+ )?PRIVATE KEY-----\n?", re.DOTALL)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True)
class Credentials:
    """What opens a TLS channel, all PEM. Its text shows no key.

    Attributes:
        key: The private key.
        chain: Its certificate and what leads to a CA; empty before a device is enrolled.
        authorities: CA certificates to trust.
    """

    key: bytes
    chain: bytes
    authorities: bytes

    def __repr__(self) -> str:
        return f"Credentials({len(self.chain)} bytes of certificates, key not shown)"

    def channel(self) -> Any:
        """Credentials of a gRPC channel."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


def is_enrolled(state_dir: Path) -> bool:
    """Whether a state directory has a device's key: it speaks TLS and nothing else."""
    return (state_dir / DEVICE_FOLDER / IDENTITY).exists()


def split(pem: bytes) -> tuple[bytes, bytes]:
    """The private key and the certificates of a file."""
    return b"".join(_KEY.findall(pem)), b"".join(_CERTIFICATE.findall(pem))


def load_credentials(directory: Path) -> Credentials:
    """Reads a directory's identity.

    Raises:
        ConfigurationError: A file is missing or holds no key or certificate.
    """
    try:
        key, chain = split((directory / IDENTITY).read_bytes())
        authorities = (directory / AUTHORITIES).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the identity in {directory} cannot be read: {in_words(error)}") from error
    if not (key and chain and _CERTIFICATE.search(authorities)):
        raise ConfigurationError(f"{directory}: {IDENTITY} must hold a key and a certificate, {AUTHORITIES} a CA's")
    return Credentials(key, chain, authorities)


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, whole or not at all, and durably. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # one left by a crash might be readable to others
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    rename_durably(temporary, path)
