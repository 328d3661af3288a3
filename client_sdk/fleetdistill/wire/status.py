"""The `google.rpc.Status` of a rejected call, with one `ErrorInfo` that has the code and its details."""

from __future__ import annotations

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import DOMAIN, MEANINGS, Code

__all__ = ["rich_status"]

DETAILS = "grpc-status-details-bin"
"""Name of the trailer with the status."""
# Error texts are sent in trailers, which gRPC limits to 8 KiB.
MAX_SENTENCE = 1000


def rich_status(refusal: RefusedError) -> status_pb2.Status:
    """Returns the status of an error; texts are truncated to 1,000 characters."""
    details = {name: value[:MAX_SENTENCE] for name, value in refusal.details.items()}
    info = error_details_pb2.ErrorInfo(reason=refusal.code, domain=DOMAIN, metadata=details)
    packed = any_pb2.Any()
    packed.Pack(info)
    number = code_pb2.Code.Value(MEANINGS[Code(refusal.code)].status)
    return status_pb2.Status(code=number, message=str(refusal)[:MAX_SENTENCE], details=[packed])
