"""All calls of the server, who may make them, and what they do in words. Calls that are not listed are refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["in_words"]


class Caller(StrEnum):
    """Identity of a caller, as proven by its connection."""

    PLAIN = "plain text"
    ANONYMOUS = "TLS without a certificate"
    DEVICE = "device"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True)
class Access:
    """Who may make a call, and what it does in words.

    Attributes:
        callers: Callers that are allowed to make it.
        words: What it does, as in "may not change a run".
        is_long_lived: Whether it streams for as long as a caller other than a device wants.
    """

    callers: frozenset[Caller]
    words: str
    is_long_lived: bool = False


_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_ENROLMENT = "/fleetdistill.wire.v1.EnrolmentService/"
_OPERATIONS = "/fleetdistill.wire.v1.OperationsService/"
_DEVICES = frozenset({Caller.DEVICE, Caller.PLAIN})  # on plain text a secret identifies the device
_PEOPLE = frozenset({Caller.OPERATOR, Caller.VIEWER})
_INSIDE = _DEVICES | _PEOPLE
_OPERATORS = frozenset({Caller.OPERATOR})
CALLS: dict[str, Access] = {
    f"{_DEVICE}CheckIn": Access(_DEVICES, "take part in a run"),
    f"{_DEVICE}NextAsk": Access(_DEVICES, "receive a device's asks"),
    f"{_DEVICE}Heartbeat": Access(_DEVICES, "report a device as present"),
    f"{_DEVICE}Leave": Access(_DEVICES, "leave a run"),
    f"{_DEVICE}Decline": Access(_DEVICES, "decline a device's ask"),
    f"{_DEVICE}UploadStatus": Access(_DEVICES, "ask about a device's upload"),
    f"{_DEVICE}Upload": Access(_DEVICES, "upload a device's answer"),
    f"{_DEVICE}Download": Access(_DEVICES, "download a device's payload"),
    f"{_ENROLMENT}Enrol": Access(frozenset({Caller.ANONYMOUS}), "enrol a device"),
    f"{_ENROLMENT}Renew": Access(frozenset({Caller.DEVICE}), "renew a device's certificate"),
    f"{_OPERATIONS}Read": Access(_PEOPLE, "read the figures of runs", is_long_lived=True),
    f"{_OPERATIONS}WatchRun": Access(_PEOPLE, "watch a run", is_long_lived=True),
    f"{_OPERATIONS}RevokeDevice": Access(_OPERATORS, "revoke a device"),
    f"{_OPERATIONS}ForgetDevice": Access(_OPERATORS, "forget a device"),
    f"{_OPERATIONS}CreateRun": Access(_OPERATORS, "create a run"),
    f"{_OPERATIONS}ChangeRun": Access(_OPERATORS, "change a run"),
    f"{_OPERATIONS}DeleteRun": Access(_OPERATORS, "delete a run"),
    f"{_OPERATIONS}RollBackRun": Access(_OPERATORS, "roll back a run"),
    f"{_OPERATIONS}CreateTokens": Access(_OPERATORS, "create enrolment tokens"),
    f"{_OPERATIONS}RevokePerson": Access(_OPERATORS, "revoke a person"),
    f"{_OPERATIONS}ReadForOperators": Access(_OPERATORS, "read the operators' calls", is_long_lived=True),
    f"{_OPERATIONS}ExportModel": Access(_OPERATORS, "export a model", is_long_lived=True),
    f"{_OPERATIONS}BackUp": Access(_OPERATORS, "back up the store", is_long_lived=True),
    "/grpc.health.v1.Health/Check": Access(_INSIDE, "check the server's health"),
    "/grpc.health.v1.Health/Watch": Access(_INSIDE, "watch the server's health", is_long_lived=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access(
        _PEOPLE | {Caller.PLAIN}, "list the server's services", is_long_lived=True
    ),
}
"""Every gRPC method. `Read` is limited like the long-lived ones: a caller that does not read occupies memory."""
_LOCAL_CALLS = {
    "ForgetOldCa": "forget the old CA",
    "IssuePerson": "issue an identity",
    "PruneRun": "prune a run",
    "RenewServerCertificate": "renew the server's certificate",
    "RevokeTokens": "revoke enrolment tokens",
    "RotateCa": "rotate the CA",
}
"""Calls of commands on the server's machine only, in words."""
_CALLERS = {
    Caller.PLAIN: "a caller without TLS",
    Caller.ANONYMOUS: "a caller without a certificate",
}
_OPERATOR = "an operator may: use an operator's identity (--identity), or ask an operator"
_PERSON = "operators and viewers may, with their identity (--identity, from `fleetdistill pki issue`)"
_DEVICE = "a device may, with the certificate from its enrolment (`fleetdistill enrol`)"
_NEW_DEVICE = "a device that is being enrolled may, without a certificate, on the port of [server] enrol_listen"
_LOCAL = (
    "the server has no PKI, so it cannot know operators: use --store on its machine, or set [server] pki for others"
)
_ENROLMENT_PORT = "this is the enrolment port; use the port of [server] listen"


def allowed_callers(method: str) -> frozenset[Caller]:
    """Returns the callers that may use a gRPC method; none for a method that is not listed."""
    return CALLS[method].callers if method in CALLS else frozenset()


def in_words(call: str) -> str:
    """Returns what a call does, such as `delete a run` for DeleteRun; the name itself for a call of another version."""
    name = call.rpartition("/")[2]
    return _LOCAL_CALLS.get(name) or next((one.words for path, one in CALLS.items() if path.endswith(f"/{name}")), name)


def refusal(caller: Caller, name: str, method: str) -> str:
    """Returns the sentence that refuses a call: who may not do what, and what to do.

    Args:
        caller: The caller, who may not make the call.
        name: Name in the caller's certificate; empty without one.
        method: gRPC method, as in `CALLS`.
    """
    who = f"{caller} {name!r}" if name else _CALLERS.get(caller, str(caller))
    return f"{who} may not {in_words(method)}; {_advice(caller, allowed_callers(method))}"


def _advice(caller: Caller, allowed: frozenset[Caller]) -> str:
    if not allowed:
        return "nobody may: this version does not have the call"
    if allowed == {Caller.ANONYMOUS}:
        return _NEW_DEVICE
    if caller is Caller.ANONYMOUS:
        return _ENROLMENT_PORT
    if Caller.OPERATOR not in allowed:
        return _DEVICE
    if caller is Caller.PLAIN:
        return _LOCAL
    return _PERSON if Caller.VIEWER in allowed else _OPERATOR
