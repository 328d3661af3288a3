"""All calls of the server and the callers allowed to make them. Calls that are not listed are refused."""

from __future__ import annotations

from enum import StrEnum


class Caller(StrEnum):
    """Identity of a caller, as proven by its connection."""

    PLAIN = "plain text"
    ANONYMOUS = "TLS without a certificate"
    DEVICE = "device"
    OPERATOR = "operator"
    VIEWER = "viewer"


_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_ENROLMENT = "/fleetdistill.wire.v1.EnrolmentService/"
_OPERATIONS = "/fleetdistill.wire.v1.OperationsService/"
_DEVICES = frozenset({Caller.DEVICE, Caller.PLAIN})  # on plain text a secret identifies the device
_PEOPLE = frozenset({Caller.OPERATOR, Caller.VIEWER})
_INSIDE = _DEVICES | _PEOPLE
ALLOWED_CALLERS: dict[str, frozenset[Caller]] = {
    f"{_DEVICE}CheckIn": _DEVICES,
    f"{_DEVICE}NextAsk": _DEVICES,
    f"{_DEVICE}Heartbeat": _DEVICES,
    f"{_DEVICE}Leave": _DEVICES,
    f"{_DEVICE}Decline": _DEVICES,
    f"{_DEVICE}UploadStatus": _DEVICES,
    f"{_DEVICE}Upload": _DEVICES,
    f"{_DEVICE}Download": _DEVICES,
    f"{_ENROLMENT}Enrol": frozenset({Caller.ANONYMOUS}),
    f"{_ENROLMENT}Renew": frozenset({Caller.DEVICE}),
    f"{_OPERATIONS}Read": _PEOPLE,
    f"{_OPERATIONS}WatchRun": _PEOPLE,
    f"{_OPERATIONS}RevokeDevice": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}CreateRun": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}ChangeRun": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}DeleteRun": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}RollBackRun": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}CreateTokens": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}RevokePerson": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}ReadForOperators": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}ExportModel": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}BackUp": frozenset({Caller.OPERATOR}),
    "/grpc.health.v1.Health/Check": _INSIDE,
    "/grpc.health.v1.Health/Watch": _INSIDE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _PEOPLE | {Caller.PLAIN},
}
"""Maps every gRPC method to the callers that are allowed to use it."""
LONG_LIVED = frozenset(
    {
        f"{_OPERATIONS}ReadForOperators",
        f"{_OPERATIONS}ExportModel",
        f"{_OPERATIONS}BackUp",
        f"{_OPERATIONS}Read",  # limited like the others, because a caller that does not read occupies memory
        f"{_OPERATIONS}WatchRun",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""Streaming calls whose duration depends on the caller, other than the calls of devices."""
