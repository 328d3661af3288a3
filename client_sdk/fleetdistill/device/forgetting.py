"""Erases a device: asks the server to delete what the device has sent, then erases the state directory."""

from __future__ import annotations

from fleetdistill.device.temporary_refusals import link_error
from fleetdistill.errors import RefusedError
from fleetdistill.link.base import Link
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.v1 import service_pb2


def request_forgetting(link: Link, identity: service_pb2.Identity) -> bool:
    """Asks the server to delete what a device has sent.

    Returns:
        True if the server has durably recorded the request, or has no data of the device; False if it does not know
        the request, so that only its operator can be asked.

    Raises:
        LinkError: The server is unavailable, or temporarily refuses requests.
        RefusedError: The server refuses the caller.
    """
    try:
        return link.leave(identity, forget=True)
    except RefusedError as refusal:
        if refusal.code == Code.UNKNOWN_RUN or "check_in" in refusal.details:
            return True
        if is_final(refusal.code):
            raise
        raise link_error(refusal) from refusal


def operator_command(run: str, device: str) -> str:
    """Returns the command with which the server's operator deletes a device's data."""
    command = f"fleetdistill devices forget {run or 'RUN'} {device}"
    return command if run else f"{command}, with the run's name for RUN"
