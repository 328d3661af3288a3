"""The enrolment port of a store's server, saved in the store's directory for the commands that create tokens."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.store.blobs import disk_errors

__all__ = ["enrol_port_for_tokens"]

_PORT_FILE = "enrol-port"


def save_enrol_port(store: Path, port: int) -> None:
    """Saves the enrolment port of the store's front. Raises StoreError."""
    fresh = store / f"{_PORT_FILE}.new"
    with disk_errors(f"saving the enrolment port in {store}"):
        fresh.write_text(str(port))
        fresh.replace(store / _PORT_FILE)


def load_enrol_port(store: Path) -> int | None:
    """Returns the last saved enrolment port of a store, or None. Raises StoreError."""
    path = store / _PORT_FILE
    with disk_errors(f"reading {path}"):
        text = path.read_text() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def enrol_port_for_tokens(store: Path) -> int:
    """Returns the enrolment port that devices with new tokens connect to; they cannot discover it otherwise.

    Raises:
        ConfigurationError: No server has started with the store yet.
        StoreError: The port cannot be read.
    """
    port = load_enrol_port(store)
    if port is None:
        raise ConfigurationError(
            f"no server has started with the store {store} yet, so the enrolment port for the tokens is unknown; start "
            "the server first, or set --enrol-port to the port of [server] enrol_listen"
        )
    return port
