"""Where the server of a store enrols devices, kept in the store's directory for whoever makes tokens."""

from __future__ import annotations

from pathlib import Path

from fleetdistill_server.store.blobs import disk_errors

_PORT_FILE = "enrol-port"


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
