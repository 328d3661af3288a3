"""When the certificates of the server itself expire, and how to renew them."""

from __future__ import annotations

import math
import time
from pathlib import Path

from fleetdistill.errors import in_words
from fleetdistill.link.credentials import AUTHORITIES, split
from fleetdistill.link.x509 import check_fits, life
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.texts import when

OWN = {"server": SERVER, "CA": AUTHORITIES}
"""Files with the certificates of the server itself, by holder."""
RENEWALS = {"server": "renew it with `fleetdistill pki renew-server`", "CA": "see `fleetdistill pki rotate-ca`"}


SOON_SECONDS = 21 * 86_400.0
"""Time left of a certificate of the server, the CA or a person from which it is to be renewed, as in the alerts."""


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


def ending_soon(server: ServerSection) -> list[str]:
    """Returns a sentence for each certificate of the server itself that ends within `SOON_SECONDS`."""
    if (tls := server.tls()) is None:
        return []
    result, now = [], time.time()
    for holder, name in OWN.items():
        _, end = validity_of(tls.directory / name) or (now, math.inf)
        if now < end < now + SOON_SECONDS:
            result.append(f"the certificate of the {holder} expires at {when(end)}; {RENEWALS[holder]}")
    return result


def unusable(server: ServerSection) -> list[str]:
    """Returns what `not_valid` does, or a sentence if certificate, key and CA do not fit together or cannot be read."""
    tls, result = server.tls(), not_valid(server)
    if tls is None or result:
        return result
    pki = tls.directory
    try:
        check_fits(*split((pki / SERVER).read_bytes()), (pki / AUTHORITIES).read_bytes())
    except OSError as error:
        why = in_words(error)
    except ValueError as error:
        why = f"{pki / SERVER}: {error}"
    else:
        return []
    text = f"the server's certificate cannot be used, so no device can connect, or none after the next start: {why}"
    return [
        f"{text}; restore the PKI from your copy, or run `fleetdistill pki renew-server` if its CA is the right one"
    ]
