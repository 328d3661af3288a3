"""Revokes devices and people. A revoked device no longer takes part in any run."""

from __future__ import annotations

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.store import Store

_MAX_REASON = 512


def revoke_person(store: Store, role: str, name: str, reason: str) -> bool:
    """Revokes an operator or viewer permanently. Returns False if that role and name was already revoked.

    Raises:
        ConfigurationError: The role is not operator or viewer, or the name is invalid.
    """
    if role not in (Role.OPERATOR, Role.VIEWER):
        raise ConfigurationError(f"role is {role[:70]!r}, must be operator or viewer")
    if not is_name(name):
        raise ConfigurationError(f"name is {name[:70]!r}, must be {NAME_RULE}")
    return store.credentials.revoke(f"{role}:{name}", reason[:_MAX_REASON])


def revoke_device(store: Store, device: str, reason: str) -> bool:
    """Revokes a device permanently and closes its open asks. Returns False if it was already revoked.

    Args:
        store: The server's store.
        device: Id of the device; it need not have checked in yet.
        reason: Reason for the revocation; only the first 512 characters are stored.

    Raises:
        ConfigurationError: `device` is not a valid device id.
    """
    if not is_name(device):
        raise ConfigurationError(f"device id is {device[:70]!r}, must be {NAME_RULE}")
    with store.transaction():
        if not store.credentials.revoke(f"{Role.DEVICE}:{device}", reason[:_MAX_REASON]):
            return False
        for run in store.runs.names():
            if store.devices.get(run, device) is not None:
                store.devices.mark_absent(run, device, "device revoked")
                text = f"device {device} was revoked: {reason[:_MAX_REASON] or 'no reason given'}"
                store.history.add_event(run, "revoked", text, device=device)
    return True
