"""The TLS settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENROL_PORT = 50052
"""Default port for enrolment."""


@dataclass(frozen=True)
class Tls:
    """TLS of a front.

    Attributes:
        directory: Directory of the PKI.
        enrol_listen: `host:port` of the enrolment port.
        certificate_days: Lifetime of a device's certificate in days.
    """

    directory: Path
    enrol_listen: str
    certificate_days: float
