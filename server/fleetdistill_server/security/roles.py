"""Every call that the server has, and who may call it. A call that is not in the table is refused to all."""

from __future__ import annotations

from enum import StrEnum


class Caller(StrEnum):
    """What a connection proves of whoever calls."""

    PLAIN = "plain text"
    ANONYMOUS = "TLS without a certificate"
    DEVICE = "device"
    OPERATOR = "operator"
    VIEWER = "viewer"


_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_ENROLMENT = "/fleetdistill.wire.v1.EnrolmentService/"
_OPERATIONS = "/fleetdistill.wire.v1.OperationsService/"
_DEVICES = frozenset({Caller.DEVICE, Caller.PLAIN})  # on plain text the secret of the first check-in tells the device
_PEOPLE = frozenset({Caller.OPERATOR, Caller.VIEWER})
_INSIDE = _DEVICES | _PEOPLE
WHO_MAY: dict[str, frozenset[Caller]] = {
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
    f"{_OPERATIONS}ListRuns": _PEOPLE,
    f"{_OPERATIONS}ShowRun": _PEOPLE,
    f"{_OPERATIONS}WatchRun": _PEOPLE,
    f"{_OPERATIONS}RevokeDevice": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}CancelRun": frozenset({Caller.OPERATOR}),
    f"{_OPERATIONS}CreateTokens": frozenset({Caller.OPERATOR}),
    "/grpc.health.v1.Health/Check": _INSIDE,
    "/grpc.health.v1.Health/Watch": _INSIDE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _PEOPLE | {Caller.PLAIN},
}
"""Every method that the server has, and its callers."""
STAYS_OPEN = frozenset(
    {
        f"{_OPERATIONS}WatchRun",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""Calls beside those of devices that stay open as long as their caller wants."""
