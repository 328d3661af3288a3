"""TLS of a server: the same settings in run.toml, for the supervisor and for the front."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENROL_PORT = 50052
"""Where devices enrol unless the operator says otherwise."""


@dataclass(frozen=True)
class Tls:
    """TLS of a front.

    Attributes:
        directory: Of the PKI.
        enrol_listen: `host:port` of the enrolment port.
        certificate_days: Life of a device's certificate.
    """

    directory: Path
    enrol_listen: str
    certificate_days: float
