"""A device that gets its certificate from a server that lies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fuzz.liar import Liar
from support.secured import make_pki

from fleetdistill.errors import FleetDistillError
from fleetdistill.link.enrolment import Enrolment, write_token
from fleetdistill.wire.v1 import enrolment_pb2
from fleetdistill_server.security.certificates import read_request
from fleetdistill_server.security.pki import Authority

_TOKEN = write_token(enrolment_pb2.EnrolmentToken(secret=b"s" * 32, ca=b"ca", port=2))


class _Lied(Enrolment):
    """Asks a liar instead of a server."""

    def __init__(self, liar: Liar, state_dir: Path, answer: Any) -> None:
        super().__init__("127.0.0.1:1", state_dir, "d", _TOKEN)
        self._liar, self._answer = liar, answer

    def _call(self, call: str, request: Any, server: str, credentials: Any) -> Any:
        self._liar.refuse()
        if call == "Renew":
            return self._liar.word(enrolment_pb2.RenewResponse(**self._answer))
        return self._liar.word(enrolment_pb2.EnrolResponse(**self._answer))


def enrol_with_lies(liar: Liar, folder: Path) -> str:
    """One enrolment, and one renewal where that went well; the state directory must open again. Says how it went."""
    pki, state_dir = folder / "pki", folder / "device"
    authority = Authority(pki) if pki.exists() else make_pki(pki)
    shutil.rmtree(state_dir, ignore_errors=True)
    state_dir.mkdir(parents=True)
    key = read_request(_Lied(liar, state_dir, {})._request)
    answer = {"certificate": authority.sign_device(key, "d", "", 30.0).pem, "authorities": authority.bundle}
    try:
        enrolled = _Lied(liar, state_dir, answer)
        enrolled.current().channel()
        enrolled._due = 0.0
        enrolled.current().channel()
        return "enrolled"
    except FleetDistillError as error:
        return f"enrolment: {type(error).__name__}"
    finally:
        _Lied(liar, state_dir, answer)
