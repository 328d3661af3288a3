"""How a server is told to speak TLS: the same words in run.toml, for the supervisor and for the front."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetdistill_server.store.blobs import disk_errors

ENROL_PORT = 50052
"""Where devices enrol unless the operator says otherwise."""
_PORT_FILE = "enrol-port"


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

    def arguments(self) -> list[str]:
        """The same for the front's command line."""
        days = str(self.certificate_days)
        return ["--pki", str(self.directory), "--enrol-listen", self.enrol_listen, "--certificate-days", days]


def note_enrol_port(store: Path, port: int) -> None:
    """Leaves in the store's directory where its front takes devices in, for who makes tokens. Raises StoreError."""
    fresh = store / f"{_PORT_FILE}.new"
    with disk_errors(f"noting the enrolment port in {store}"):
        fresh.write_text(str(port))
        fresh.replace(store / _PORT_FILE)


def known_enrol_port(store: Path) -> int | None:
    """Where a front of the store last took devices in; None if none ever did. Raises StoreError."""
    path = store / _PORT_FILE
    with disk_errors(f"reading {path}"):
        text = path.read_text() if path.exists() else ""
    return int(text) if text.isdecimal() else None
