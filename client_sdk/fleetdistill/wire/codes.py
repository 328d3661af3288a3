"""Why the server says no: every reason that an error on the wire can carry, and its gRPC status.

The same table serves the front, the links and `docs/reference/errors.md`. A *final* refusal of an upload puts the
device out for the round; after any other one the device may try again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

DOMAIN = "fleetdistill"
AFTER_SECONDS = "after_seconds"
"""Detail of a refusal that passes by itself: seconds until it is worth trying again."""
LONGEST_AFTER_SECONDS = 3600.0
"""A device does not stay away for longer, whatever it is told."""


@dataclass(frozen=True)
class Meaning:
    """gRPC status name, whether trying the same again is useless, and what it says."""

    status: str
    final: bool
    text: str


class Code(StrEnum):
    """Machine-readable reasons; the value travels as `ErrorInfo.reason`."""

    NOT_READY = "not-ready"
    UNKNOWN_RUN = "unknown-run"
    BAD_IDENTITY = "bad-identity"
    BAD_TOKEN = "bad-token"
    EXPIRED = "expired"
    REVOKED = "revoked"
    NOT_ALLOWED = "not-allowed"
    CONTRACT_MISMATCH = "contract-mismatch"
    COLUMN_NOT_ALLOWED = "column-not-allowed"
    BAD_MESSAGE = "bad-message"
    BAD_TENSOR = "bad-tensor"
    BAD_VALUE = "bad-value"
    TOO_LARGE = "too-large"
    NOT_ASKED = "not-asked"
    LATE = "late"
    CLOSED = "closed"
    SUPERSEDED = "superseded"
    CHECKSUM = "checksum"
    INCOMPLETE = "incomplete"
    OUT_OF_STEP = "out-of-step"
    NOT_FOUND = "not-found"
    NO_SPACE = "no-space"
    TOO_MANY = "too-many"
    INTERNAL = "internal"


def after_seconds(details: Mapping[str, str]) -> float:
    """When a refusal says to come back: seconds from now, 0 to an hour; 0 where it says nothing."""
    try:
        said = float(details.get(AFTER_SECONDS, "0"))
    except ValueError:
        return 0.0
    return min(max(said, 0.0), LONGEST_AFTER_SECONDS) if math.isfinite(said) else 0.0


def is_final(code: str) -> bool:
    """Whether trying the same again is useless; so it is for a reason that this version does not know."""
    return code not in set(Code) or MEANINGS[Code(code)].final


def status_of(code: str) -> str:
    """Name of the gRPC status that goes with a reason; empty for one that this version does not know."""
    return MEANINGS[Code(code)].status if code in set(Code) else ""


MEANINGS: dict[Code, Meaning] = {
    Code.NOT_READY: Meaning("UNAVAILABLE", False, "the server is still preparing the run; come back"),
    Code.UNKNOWN_RUN: Meaning("NOT_FOUND", True, "the server has no run of that name"),
    Code.BAD_IDENTITY: Meaning("UNAUTHENTICATED", True, "the device id is taken by another secret, or malformed"),
    Code.BAD_TOKEN: Meaning("UNAUTHENTICATED", True, "the enrolment token is unknown, used, revoked or has expired"),
    Code.EXPIRED: Meaning("UNAUTHENTICATED", True, "the caller's certificate has expired; renew it and call again"),
    Code.REVOKED: Meaning("PERMISSION_DENIED", True, "the device, the person or the certificate was revoked"),
    Code.NOT_ALLOWED: Meaning("PERMISSION_DENIED", True, "whoever calls may not make this call, or not for this name"),
    Code.CONTRACT_MISMATCH: Meaning("FAILED_PRECONDITION", True, "the device does not fit the run's contract"),
    Code.COLUMN_NOT_ALLOWED: Meaning("FAILED_PRECONDITION", True, "the method needs a column the app keeps back"),
    Code.BAD_MESSAGE: Meaning("INVALID_ARGUMENT", True, "the message breaks the protocol"),
    Code.BAD_TENSOR: Meaning("INVALID_ARGUMENT", True, "a tensor has the wrong name, type or shape"),
    Code.BAD_VALUE: Meaning("INVALID_ARGUMENT", True, "a value is NaN, infinite, out of range or doubled"),
    Code.TOO_LARGE: Meaning("INVALID_ARGUMENT", True, "the payload is over the limit"),
    Code.NOT_ASKED: Meaning("FAILED_PRECONDITION", True, "the device was not asked for this"),
    Code.LATE: Meaning("FAILED_PRECONDITION", True, "the ask's deadline has passed"),
    Code.CLOSED: Meaning("FAILED_PRECONDITION", True, "the ask takes no answer any more"),
    Code.SUPERSEDED: Meaning("FAILED_PRECONDITION", True, "another answer to the ask was accepted"),
    Code.CHECKSUM: Meaning("DATA_LOSS", False, "bytes were changed on the way"),
    Code.INCOMPLETE: Meaning("ABORTED", False, "the stream ended before all bytes came"),
    Code.OUT_OF_STEP: Meaning("ABORTED", False, "the upload does not go on where the server stands; ask its status"),
    Code.NOT_FOUND: Meaning("NOT_FOUND", True, "the server holds no such payload for this device"),
    Code.NO_SPACE: Meaning("RESOURCE_EXHAUSTED", False, "the server's disk is full; no receipt is given"),
    Code.TOO_MANY: Meaning("RESOURCE_EXHAUSTED", False, "the device asks for more than its share; come back later"),
    Code.INTERNAL: Meaning("INTERNAL", False, "a fault of the server; its log says more"),
}
