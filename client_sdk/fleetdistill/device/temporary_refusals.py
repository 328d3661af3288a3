"""Converts refusals that the server may withdraw later into `LinkError`, for every call of the app."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fleetdistill.device.session import Session
from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.wire.codes import Code, after_seconds, is_final


@contextlib.contextmanager
def as_link_errors(session: Session) -> Iterator[None]:
    """Converts temporary refusals in the block; after the loss of the device's registration it checks in again.

    Raises:
        LinkError: The server refused a call temporarily.
        RefusedError: The server refused a call permanently.
    """
    try:
        yield
    except RefusedError as refusal:
        if refusal.code == Code.BAD_IDENTITY and "check_in" in refusal.details:
            session.terms = None  # a server restored from a backup no longer has this device: check in again
        elif is_final(refusal.code):
            raise
        raise link_error(refusal) from refusal


def link_error(refusal: RefusedError) -> LinkError:
    """Returns the error for a temporary refusal, with the time before a retry."""
    return LinkError(str(refusal), after_seconds(refusal.details))
