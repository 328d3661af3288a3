"""When the certificates of the server itself expire, and how to renew them."""

from __future__ import annotations

import math
import time
from pathlib import Path

from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.link.x509 import life
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.texts import when

OWN = {"server": SERVER, "CA": AUTHORITIES}
"""Files with the certificates of the server itself, by holder."""
RENEWALS = {"server": "renew it with `fleetdistill pki renew-server`", "CA": "see `fleetdistill pki rotate-ca`"}


def validity_of(path: Path) -> tuple[float, float] | None:
    """Returns start and end of a certificate in Unix seconds, as `life`; None while the file is being replaced."""
    try:
        return life(path.read_bytes())
    except (OSError, ValueError):
        return None


def not_valid(server: ServerSection) -> list[str]:
    """Returns a sentence for each certificate of the server itself that is not valid now; empty in plain text."""
    if (tls := server.tls()) is None:
        return []
    result, now = [], time.time()
    for holder, name in OWN.items():
        start, end = validity_of(tls.directory / name) or (now, math.inf)
        if not start <= now < end:
            state = "has expired" if end <= now else f"is valid only from {when(start)}"
            result.append(f"the certificate of the {holder} {state}, so nobody can connect; {RENEWALS[holder]}")
    return result
