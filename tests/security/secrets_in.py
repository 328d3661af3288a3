"""Searches text for secrets, in the forms in which programs write bytes and text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping

from fleetdistill.link.enrolment import read_token
from fleetdistill.wire.v1 import service_pb2

Secrets = Mapping[str, str | bytes]
"""Secrets by what they are, such as "token of camera-1"."""
_HEADER = "PRIVATE KEY"
_ENOUGH = 40
"""Characters of a long secret that are not in a text by chance."""


def secrets_of_token(name: str, token: str) -> dict[str, str | bytes]:
    """A token, and the secret in it."""
    return {f"token {name}": token, f"secret of token {name}": read_token(token).secret}


def lines_of_key(name: str, pem: bytes) -> dict[str, str | bytes]:
    """The lines of a private key, without those that say that it is one."""
    lines = pem.decode().split("-----BEGIN PRIVATE KEY-----\n", 1)[1].split("-----END", 1)[0].split()
    return {f"line {number} of key {name}": line for number, line in enumerate(lines)}


def found_secrets(text: str, secrets: Secrets) -> list[str]:
    """Names of the secrets that a text contains, whole or their beginning."""
    result = [name for name, secret in secrets.items() if any(form in text for form in _forms(secret))]
    return result + ([_HEADER] if _HEADER in text else [])


def _forms(secret: str | bytes) -> Iterable[str]:
    if isinstance(secret, str):
        return [secret[:_ENOUGH]]
    start = secret[: len(secret) // 2]
    in_base64 = [encode(start).decode().rstrip("=")[:-1] for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    of_message = str(service_pb2.Identity(secret=start)).partition('"')[2].rpartition('"')[0]
    escaped = [form for text in (repr(start)[2:-1], of_message) for form in (text, json.dumps(text)[1:-1])]
    return [start.hex(), start.hex().upper(), *in_base64, *escaped]
