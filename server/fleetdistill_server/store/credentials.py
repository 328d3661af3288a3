"""Enrolment tokens, certificates and revocations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from fleetdistill_server.store.database import Database
from fleetdistill_server.store.records import Certificate, Revocation, Token
from fleetdistill_server.texts import shorten

REVOKED = "EXISTS (SELECT 1 FROM revocations WHERE subject = 'device:' || device)"
"""SQL condition for statements on `devices`: true if the row's device has been revoked."""
_OPEN = "device IS NULL AND revoked = 0 AND created_at < ? AND expires_at > ?"
"""SQL condition for statements on `tokens`: created before a time, and of use to a device now."""


class Credentials:
    """Reads and writes the tables `tokens`, `certificates` and `revocations`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add_tokens(self, hashes: Mapping[bytes, str], run: str, expires_at: float) -> None:
        """Stores the SHA-256 hashes of new enrolment tokens, each with its device id; empty for any device."""
        row = {"run": run, "created_at": time.time(), "expires_at": expires_at, "revoked": 0}
        with self._db.transaction():
            for one, device in hashes.items():
                self._db.insert("tokens", {"hash": one, "for_device": device, **row})

    def token(self, token_hash: bytes) -> Token | None:
        """Returns an enrolment token by the SHA-256 of its secret, or None."""
        row = self._db.row("SELECT * FROM tokens WHERE hash = ?", token_hash)
        return None if row is None else Token.from_row(row)

    def tokens(self) -> list[Token]:
        """Returns all enrolment tokens, oldest first."""
        return list(map(Token.from_row, self._db.rows("SELECT * FROM tokens ORDER BY created_at, hash")))

    def count_open_tokens(self, before: float) -> int:
        """Returns how many tokens created before a time a device can still use."""
        return int(self._db.value(f"SELECT count(*) FROM tokens WHERE {_OPEN}", before, time.time()))

    def revoke_open_tokens(self, before: float) -> int:
        """Revokes the tokens created before a time that a device can still use; returns their number."""
        return self._db.write(f"UPDATE tokens SET revoked = 1 WHERE {_OPEN}", before, time.time())

    def has_device(self, device: str) -> bool:
        """Returns whether a device with this id has enrolled or has checked in to any run."""
        sql = "SELECT 1 FROM certificates WHERE device = ? UNION ALL SELECT 1 FROM devices WHERE device = ? LIMIT 1"
        return self._db.exists(sql, device, device)

    def device_ids(self) -> list[str]:
        """Returns the ids of all devices that have enrolled or have checked in to any run."""
        rows = self._db.rows("SELECT device FROM certificates UNION SELECT device FROM devices ORDER BY device")
        return [row["device"] for row in rows]

    def revoke_tokens(self, prefix: str) -> int:
        """Revokes the unused tokens whose hash begins with these hex digits; returns their number."""
        with self._db.transaction():
            unused = self._db.rows("SELECT hash FROM tokens WHERE revoked = 0 AND device IS NULL")
            meant = [row["hash"] for row in unused if row["hash"].hex().startswith(prefix)]
            for item in meant:
                self._db.write("UPDATE tokens SET revoked = 1 WHERE hash = ?", item)
        return len(meant)

    def use_token(self, token_hash: bytes, certificate: Certificate) -> None:
        """Marks a token as used and stores the certificate issued for it, in one transaction."""
        with self._db.transaction():
            self.add_certificate(certificate)
            self._db.write(
                "UPDATE tokens SET device = ?, serial = ? WHERE hash = ?",
                *(certificate.device, certificate.serial, token_hash),
            )

    def add_certificate(self, certificate: Certificate) -> None:
        """Stores a certificate and deletes the device's expired certificates."""
        with self._db.transaction():
            self._db.write(
                "DELETE FROM certificates WHERE device = ? AND expires_at < ?", certificate.device, time.time()
            )
            self._db.insert("certificates", asdict(certificate))

    def certificates(self, device: str) -> list[Certificate]:
        """Returns the certificates of a device, newest last."""
        rows = self._db.rows("SELECT * FROM certificates WHERE device = ? ORDER BY expires_at, issued_at", device)
        return list(map(Certificate.from_row, rows))

    def newest_certificates(self) -> list[Certificate]:
        """Returns the certificate of each device that expires last, of equal ones the newest, ordered by device."""
        rows = self._db.rows(
            "SELECT c.* FROM certificates c WHERE NOT EXISTS (SELECT 1 FROM certificates n WHERE n.device = c.device "
            "AND (n.expires_at, n.issued_at, n.serial) > (c.expires_at, c.issued_at, c.serial)) "
            "ORDER BY c.device"
        )
        return list(map(Certificate.from_row, rows))

    def certificate(self, serial: str) -> Certificate | None:
        """Returns a certificate by its serial number in hex, or None."""
        row = self._db.row("SELECT * FROM certificates WHERE serial = ?", serial)
        return None if row is None else Certificate.from_row(row)

    def revoke(self, subject: str, reason: str) -> bool:
        """Revokes a device, operator, viewer or certificate permanently; returns False if it was already revoked."""
        row = {"subject": subject, "reason": shorten(reason), "at": time.time()}
        with self._db.transaction():
            known = self.is_revoked(subject, "")
            self._db.insert("revocations", row, "ON CONFLICT (subject) DO NOTHING")
        return not known

    def is_revoked(self, holder: str, certificate: str = "") -> bool:
        """Returns whether a holder (`device:ID`) or its certificate (`serial:HEX`) is revoked; runs for every call."""
        sql = "SELECT 1 FROM revocations WHERE subject IN (?, ?) LIMIT 1"
        return self._db.exists(sql, holder, certificate)

    def revocations(self) -> list[Revocation]:
        """Returns all revocations, oldest first."""
        return list(map(Revocation.from_row, self._db.rows("SELECT * FROM revocations ORDER BY at")))
