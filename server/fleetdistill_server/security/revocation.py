"""Shutting a device out of the server, with everything that follows in the runs it takes part in."""

from __future__ import annotations

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import is_name
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.store import Store

_LONGEST_REASON = 512


def revoke_device(store: Store, device: str, reason: str) -> bool:
    """Shuts a device out from its next call on, for good; its open asks are closed. False if it was so before.

    Args:
        store: The server's.
        device: Its id; it need not have called yet.
        reason: Why; of more than 512 characters the first 512 are kept.

    Raises:
        ConfigurationError: No device can have this id.
    """
    if not is_name(device):
        raise ConfigurationError(f"device id {device[:70]!r} must be 1 to 64 letters, digits, '-', '_' or '.'")
    with store.transaction():
        if not store.credentials.revoke(f"{Role.DEVICE}:{device}", reason[:_LONGEST_REASON]):
            return False
        for run in (row["name"] for row in store.runs.all()):
            if store.devices.get(run, device) is not None:
                store.devices.mark_gone(run, device, "device revoked")
                text = f"device {device} was revoked: {reason[:_LONGEST_REASON] or 'no reason given'}"
                store.history.add_event(run, "revoked", text, device=device)
    return True
