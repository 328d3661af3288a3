"""Calls in words: what each one does, and who may make it instead of a caller who may not."""

from __future__ import annotations

from fleetdistill_server.security.roles import ALLOWED_CALLERS, Caller

_IN_WORDS = {
    "CheckIn": "take part in a run",
    "NextAsk": "receive a device's asks",
    "Heartbeat": "report a device as present",
    "Leave": "leave a run",
    "Decline": "decline a device's ask",
    "UploadStatus": "ask about a device's upload",
    "Upload": "upload a device's answer",
    "Download": "download a device's payload",
    "Enrol": "enrol a device",
    "Renew": "renew a device's certificate",
    "Read": "read the figures of runs",
    "WatchRun": "watch a run",
    "RevokeDevice": "revoke a device",
    "CreateRun": "create a run",
    "ChangeRun": "change a run",
    "DeleteRun": "delete a run",
    "RollBackRun": "roll back a run",
    "CreateTokens": "create enrolment tokens",
    "RevokePerson": "revoke a person",
    "ReadForOperators": "read the operators' calls",
    "ExportModel": "export a model",
    "BackUp": "back up the store",
    "Check": "check the server's health",
    "Watch": "watch the server's health",
    "ServerReflectionInfo": "list the server's services",
    # Calls of commands on the server's machine only:
    "ForgetDevice": "forget a device",
    "ForgetOldCa": "forget the old CA",
    "PruneRun": "prune a run",
    "RevokeTokens": "revoke enrolment tokens",
}
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


def in_words(call: str) -> str:
    """Returns what a call does, such as `delete a run` for DeleteRun; the name itself for a call of another version."""
    return _IN_WORDS.get(call.rpartition("/")[2], call)


def refusal(caller: Caller, name: str, method: str) -> str:
    """Returns the sentence that refuses a call: who may not do what, and what to do.

    Args:
        caller: The caller, who may not make the call.
        name: Name in the caller's certificate; empty without one.
        method: gRPC method, as in `ALLOWED_CALLERS`.
    """
    who = f"{caller} {name!r}" if name else _CALLERS.get(caller, str(caller))
    return f"{who} may not {in_words(method)}; {_advice(caller, ALLOWED_CALLERS.get(method, frozenset()))}"


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
