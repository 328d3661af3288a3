"""When the certificates of the server itself expire, and how to renew them."""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509

from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.pki import SERVER

OWN = {"server": SERVER, "CA": AUTHORITIES}
"""Files with the certificates of the server itself, by holder."""
RENEWALS = {"server": "renew it with `fleetdistill pki renew-server`", "CA": "see `fleetdistill pki rotate-ca`"}


def expiry_of(path: Path) -> float | None:
    """Returns the Unix time at which the first certificate of a file expires; None while the file is being replaced."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0].not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def expired(server: ServerSection) -> list[str]:
    """Returns a sentence for each certificate of the server itself that has expired; empty in plain text."""
    tls = server.tls()
    ends = {} if tls is None else {holder: expiry_of(tls.directory / name) for holder, name in OWN.items()}
    return [
        f"the certificate of the {holder} has expired, so nobody can connect; {RENEWALS[holder]}"
        for holder, end in ends.items()
        if end is not None and end <= time.time()
    ]
