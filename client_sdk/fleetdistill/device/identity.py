"""The identity of a device: its id, run, secret and data key, stored in the state directory."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, StateError
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.state.directory import Storage
from fleetdistill.state.format import identity_error
from fleetdistill.state.own_files import DEVICE
from fleetdistill.state.saved_profile import CONTRACT, PROFILE
from fleetdistill.state.sent_ledger import LEDGER
from fleetdistill.state.state_check import STATES
from fleetdistill.wire.v1 import service_pb2

__all__ = ["save_identity"]

_NAMES = {"run": "run", "device": "device id"}
"""How errors name the fields."""
_OF_DEVICE = (LEDGER, PROFILE, CONTRACT, *STATES)
"""Files that only a device which has called a server has."""


def load_identity(storage: Storage, run: str, device_id: str | None) -> service_pb2.Identity:
    """Loads the identity from a state directory; creates and saves one in a new directory.

    Until a server has accepted the device, the app may correct the run's name and, without a certificate, the id.

    Args:
        storage: State directory of the device.
        run: Name of the run, or empty if the app does not specify one.
        device_id: Name of the device, or None if the app does not specify one.

    Raises:
        ConfigurationError: `device_id` is not a valid name.
        DamagedStateError: `device.json` is damaged, or missing beside other files of a device, without `device_id`.
        StateError: The directory belongs to another run or device.
    """
    saved = storage.load_identity()
    if device_id is None and "device" not in saved:
        _check_is_new(storage)
    accepted = any(storage.load(name) is not None for name in (PROFILE, CONTRACT))
    if accepted:
        _check_belongs(storage.directory, saved, "run", run)
        run = run or saved.get("run", "")
    if accepted or is_enrolled(storage.directory):
        _check_belongs(storage.directory, saved, "device", device_id)
    device = device_id or saved.get("device") or str(uuid.uuid4())
    if not is_name(device):
        raise ConfigurationError(f"device_id is {device!r}, must be {NAME_RULE}")
    identity = service_pb2.Identity(run=run, device=device, secret=_key_in(storage, saved, "secret"))
    if (saved.get("run"), saved.get("device")) != (identity.run, identity.device):
        # Before the first call: after a lost response the id would be locked by an unknown secret.
        save_identity(storage, identity)
    return identity


def save_identity(storage: Storage, identity: service_pb2.Identity) -> None:
    """Saves an identity in the state directory."""
    storage.save_identity({"device": identity.device, "run": identity.run, "secret": identity.secret.hex()})


def save_server(storage: Storage, server: str) -> None:
    """Saves the address of the server that has accepted the device, for `fleetdistill device forget`."""
    if storage.load_identity().get("server") != server:
        storage.save_identity({"server": server})


def data_key(storage: Storage) -> bytes:
    """Returns the key of data versions, 32 bytes that never leave the device; creates and saves it at the first call.

    Raises:
        StateError: The file is damaged.
    """
    saved = storage.load_identity()
    key = _key_in(storage, saved, "data_key")
    if "data_key" not in saved:
        storage.save_identity({"data_key": key.hex()})
    return key


def _check_is_new(storage: Storage) -> None:
    """Raises DamagedStateError if a device has used the directory: with a new id the same rows would count twice."""
    known = next((name for name in _OF_DEVICE if storage.load(name) is not None), "")
    if known:
        problem = f"is missing, but {known} shows that a device has used this directory, whose id and secret it had"
        raise identity_error(storage.directory / DEVICE, problem)


def _key_in(storage: Storage, saved: dict[str, Any], name: str) -> bytes:
    """Returns a saved key, or a new one if there is none. Raises DamagedStateError if it is not hexadecimal."""
    try:
        return bytes.fromhex(saved[name]) if name in saved else secrets.token_bytes(32)
    except (ValueError, TypeError) as error:
        problem = f"is damaged: its {name} is not hexadecimal"
        raise identity_error(storage.directory / DEVICE, problem) from error


def _check_belongs(directory: Path, saved: dict[str, Any], field: str, given: str | None) -> None:
    name, known = _NAMES[field], saved.get(field)
    if given and known and given != known:
        raise StateError(
            f"the state directory {directory} belongs to {name} {known!r}, not {given!r}; "
            f"use another directory or {name} {known!r}"
        )
