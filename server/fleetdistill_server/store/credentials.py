"""Enrolment tokens, certificates and revocations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.texts import shortened

REVOKED = "EXISTS (SELECT 1 FROM revocations WHERE subject = 'device:' || device)"
"""Whether a row's device was revoked, for the condition of a statement on `devices`."""


class Credentials:
    """Rows of `tokens`, `certificates` and `revocations`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add_tokens(self, hashes: Mapping[bytes, str], run: str, expires_at: float) -> None:
        """Keeps the SHA-256 of new enrolment tokens, each with the device that it is for; empty for any."""
        row = {"run": run, "created_at": time.time(), "expires_at": expires_at, "revoked": 0}
        with self._db.transaction():
            for one, device in hashes.items():
                self._db.insert("tokens", {"hash": one, "for_device": device, **row})

    def token(self, token_hash: bytes) -> Row | None:
        """An enrolment token by the SHA-256 of its secret."""
        return self._db.row("SELECT * FROM tokens WHERE hash = ?", token_hash)

    def tokens(self) -> list[Row]:
        """All enrolment tokens, oldest first."""
        return self._db.rows("SELECT * FROM tokens ORDER BY created_at, hash")

    def knows_device(self, device: str) -> bool:
        """Whether a device of this id has enrolled, or checked in to any run."""
        sql = "SELECT 1 FROM certificates WHERE device = ? UNION ALL SELECT 1 FROM devices WHERE device = ? LIMIT 1"
        return bool(self._db.value(sql, device, device))

    def revoke_tokens(self, prefix: str) -> int:
        """Revokes the unused tokens whose hash begins with these hex digits; returns how many that were."""
        sql = "UPDATE tokens SET revoked = 1 WHERE revoked = 0 AND device IS NULL AND instr(lower(hex(hash)), ?) = 1"
        return self._db.write(sql, prefix)

    def use_token(self, token_hash: bytes, certificate: Mapping[str, Any]) -> None:
        """Marks a token as used and records the certificate that it was used for, in one transaction."""
        with self._db.transaction():
            self.add_certificate(certificate)
            self._db.write(
                "UPDATE tokens SET device = ?, serial = ? WHERE hash = ?",
                *(certificate["device"], certificate["serial"], token_hash),
            )

    def add_certificate(self, certificate: Mapping[str, Any]) -> None:
        """Records a certificate and forgets those of its device that have expired."""
        with self._db.transaction():
            self._db.write(
                "DELETE FROM certificates WHERE device = ? AND expires_at < ?", certificate["device"], time.time()
            )
            self._db.insert("certificates", certificate)

    def certificates(self, device: str) -> list[Row]:
        """Certificates of a device, the newest last."""
        return self._db.rows("SELECT * FROM certificates WHERE device = ? ORDER BY expires_at, issued_at", device)

    def certificate(self, serial: str) -> Row | None:
        """A certificate by its serial number in hex."""
        return self._db.row("SELECT * FROM certificates WHERE serial = ?", serial)

    def revoke(self, subject: str, reason: str) -> bool:
        """Shuts out a device, a person or a certificate, for good; False if it was so already."""
        row = {"subject": subject, "reason": shortened(reason), "at": time.time()}
        with self._db.transaction():
            known = self.revocation(subject, "") is not None
            self._db.insert("revocations", row, "ON CONFLICT (subject) DO NOTHING")
        return not known

    def revocation(self, holder: str, certificate: str) -> Row | None:
        """Whether a holder or its certificate was revoked: `device:ID` and `serial:HEX`."""
        return self._db.row("SELECT * FROM revocations WHERE subject IN (?, ?) LIMIT 1", holder, certificate)

    def is_revoked(self, holder: str, certificate: str) -> bool:
        """The same in short, for every call that a server answers."""
        sql = "SELECT 1 FROM revocations WHERE subject IN (?, ?) LIMIT 1"
        return self._db.exists(sql, holder, certificate)

    def revocations(self) -> list[Row]:
        """Everything that was revoked, oldest first."""
        return self._db.rows("SELECT * FROM revocations ORDER BY at")
