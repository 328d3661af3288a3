"""Error codes of the protocol: every reason for which the server rejects a call, and its gRPC status.

The front, the links and `docs/reference/errors.md` use this table. After a *final* error of an upload the device skips
the round; after any other error it can retry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from fleetdistill.errors import RefusedError

__all__ = ["Code", "rich_status", "status_of"]

DOMAIN = "fleetdistill"
AFTER_SECONDS = "after_seconds"
"""Detail of a temporary error: seconds until a retry."""
MAX_AFTER_SECONDS = 3600.0
"""Longest wait before a retry in seconds; longer values from a server are clamped."""
DETAILS = "grpc-status-details-bin"
"""Name of the trailer with the status."""
# Error texts are sent in trailers, which gRPC limits to 8 KiB.
MAX_SENTENCE = 1000


@dataclass(frozen=True)
class Meaning:
    """A code's gRPC status name, description, and whether a retry is useless."""

    status: str
    final: bool
    text: str


class Code(StrEnum):
    """Machine-readable error codes, sent as `ErrorInfo.reason`."""

    NOT_READY = "not-ready"
    UNKNOWN_RUN = "unknown-run"
    BAD_IDENTITY = "bad-identity"
    BAD_TOKEN = "bad-token"
    EXPIRED = "expired"
    OLD_CA = "old-ca"
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


NEED_CERTIFICATE = (Code.EXPIRED, Code.OLD_CA)
"""Codes after which a caller needs a new certificate."""


def after_seconds(details: Mapping[str, str]) -> float:
    """Returns the seconds to wait before a retry, in [0, 3,600]; 0 if the error does not state them."""
    try:
        seconds = float(details.get(AFTER_SECONDS, "0"))
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_AFTER_SECONDS) if math.isfinite(seconds) else 0.0


def is_final(code: str) -> bool:
    """Returns whether a retry is useless; True for codes that this version does not know."""
    return code not in set(Code) or MEANINGS[Code(code)].final


def status_of(code: str) -> str:
    """Returns the gRPC status name of a code; empty for codes that this version does not know."""
    return MEANINGS[Code(code)].status if code in set(Code) else ""


MEANINGS: dict[Code, Meaning] = {
    Code.NOT_READY: Meaning(
        "UNAVAILABLE", False, "the server is preparing the run, or its database is not available; retry later"
    ),
    Code.UNKNOWN_RUN: Meaning("NOT_FOUND", True, "the server has no run of that name"),
    Code.BAD_IDENTITY: Meaning("UNAUTHENTICATED", True, "the device id is taken by another secret, or malformed"),
    Code.BAD_TOKEN: Meaning("UNAUTHENTICATED", True, "the enrolment token is unknown, used, revoked or expired"),
    Code.EXPIRED: Meaning("UNAUTHENTICATED", True, "the caller's certificate has expired; renew it and call again"),
    Code.OLD_CA: Meaning(
        "UNAUTHENTICATED",
        True,
        "the server no longer accepts the CA of the caller's certificate; get a new certificate",
    ),
    Code.REVOKED: Meaning("PERMISSION_DENIED", True, "the device, the person or the certificate was revoked"),
    Code.NOT_ALLOWED: Meaning("PERMISSION_DENIED", True, "the caller must not make this call, or not for this name"),
    Code.CONTRACT_MISMATCH: Meaning("FAILED_PRECONDITION", True, "the device does not fit the run's contract"),
    Code.COLUMN_NOT_ALLOWED: Meaning(
        "FAILED_PRECONDITION", True, "the method needs a column that the app does not allow"
    ),
    Code.BAD_MESSAGE: Meaning("INVALID_ARGUMENT", True, "the message breaks the protocol"),
    Code.BAD_TENSOR: Meaning("INVALID_ARGUMENT", True, "a tensor has the wrong name, type or shape"),
    Code.BAD_VALUE: Meaning("INVALID_ARGUMENT", True, "a value is NaN, infinite, out of range or repeated"),
    Code.TOO_LARGE: Meaning("INVALID_ARGUMENT", True, "the payload is over the limit"),
    Code.NOT_ASKED: Meaning("FAILED_PRECONDITION", True, "the device was not asked for this"),
    Code.LATE: Meaning("FAILED_PRECONDITION", True, "the ask's deadline has passed"),
    Code.CLOSED: Meaning("FAILED_PRECONDITION", True, "the ask no longer accepts answers"),
    Code.SUPERSEDED: Meaning("FAILED_PRECONDITION", True, "another answer to the ask was accepted"),
    Code.CHECKSUM: Meaning("DATA_LOSS", False, "bytes were changed in transit"),
    Code.INCOMPLETE: Meaning("ABORTED", False, "the stream ended before all bytes arrived"),
    Code.OUT_OF_STEP: Meaning(
        "ABORTED", False, "the upload does not continue at the server's offset; query its status"
    ),
    Code.NOT_FOUND: Meaning("NOT_FOUND", True, "the server has no such payload for this device"),
    Code.NO_SPACE: Meaning("RESOURCE_EXHAUSTED", False, "the server's disk is full; no receipt is given"),
    Code.TOO_MANY: Meaning("RESOURCE_EXHAUSTED", False, "the device exceeds its share of the server; retry later"),
    Code.INTERNAL: Meaning("INTERNAL", False, "an internal server error; see the server's log"),
}


def rich_status(refusal: RefusedError) -> status_pb2.Status:
    """Returns the status of an error, with an `ErrorInfo` of its code; texts are truncated to 1,000 characters."""
    details = {name: value[:MAX_SENTENCE] for name, value in refusal.details.items()}
    info = error_details_pb2.ErrorInfo(reason=refusal.code, domain=DOMAIN, metadata=details)
    packed = any_pb2.Any()
    packed.Pack(info)
    number = code_pb2.Code.Value(MEANINGS[Code(refusal.code)].status)
    return status_pb2.Status(code=number, message=str(refusal)[:MAX_SENTENCE], details=[packed])
