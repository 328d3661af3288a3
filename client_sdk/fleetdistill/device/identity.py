"""Who a device is: its id, run and secret in the state directory."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, StateError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.state.directory import Storage
from fleetdistill.wire.v1 import service_pb2


def load_identity(storage: Storage, run: str, device_id: str | None) -> service_pb2.Identity:
    """The identity in a state directory; a new directory gets one.

    Args:
        storage: The state directory.
        run: The run that the app names, or empty.
        device_id: The id that the app names, if it does.

    Raises:
        ConfigurationError: `device_id` is no name.
        StateError: The directory is of another run or id, or damaged.
    """
    saved = storage.load_identity()
    _check_belongs(storage.directory, saved, run, device_id)
    device = device_id or saved.get("device") or str(uuid.uuid4())
    if not is_name(device):
        raise ConfigurationError(f"device_id {device!r} must be {NAME_RULE}")
    identity = service_pb2.Identity(run=run or saved.get("run", ""), device=device, secret=_secret_in(saved))
    if not saved:  # kept before it is sent: a lost response must not lock the id for ever
        save_identity(storage, identity)
    return identity


def save_identity(storage: Storage, identity: service_pb2.Identity) -> None:
    """Keeps an identity in the state directory."""
    storage.save_identity({"device": identity.device, "run": identity.run, "secret": identity.secret.hex()})


def _secret_in(saved: dict[str, Any]) -> bytes:
    """The device's secret: the saved one, or a fresh one for a new device."""
    try:
        return bytes.fromhex(saved["secret"]) if "secret" in saved else secrets.token_bytes(32)
    except (ValueError, TypeError) as error:
        raise StateError(f"device.json is damaged: its secret is no hex ({error}); restore the file") from error


def _check_belongs(directory: Path, saved: dict[str, Any], run: str, device_id: str | None) -> None:
    for name, given, known in (("run", run, saved.get("run")), ("device id", device_id, saved.get("device"))):
        if given and known and given != known:
            raise StateError(
                f"the state directory {directory} belongs to {name} {known!r}, not {given!r}; "
                "use another directory, or the name it belongs to"
            )
