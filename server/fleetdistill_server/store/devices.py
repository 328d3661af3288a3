"""Devices of a run: who is present, who is left out, and who is to be forgotten."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from fleetdistill_server.store.credentials import REVOKED
from fleetdistill_server.store.database import Database, Row


class Devices:
    """Rows of `devices`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, run: str, device: str) -> Row | None:
        """The device's row in a run."""
        return self._db.row("SELECT * FROM devices WHERE run = ? AND device = ?", run, device)

    def all(self, run: str) -> list[Row]:
        """All devices of a run in id order."""
        return self._db.rows("SELECT * FROM devices WHERE run = ? ORDER BY device", run)

    def count(self, run: str) -> int:
        """How many devices have checked in to a run."""
        return int(self._db.value("SELECT count(*) FROM devices WHERE run = ?", run))

    def present(self, run: str) -> list[str]:
        """Ids of the devices that are checked in, in bytewise order."""
        rows = self._db.rows(
            "SELECT device FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL ORDER BY device", run
        )
        return [row["device"] for row in rows]

    def present_profiles(self, run: str) -> dict[str, bytes]:
        """Serialized profiles of the devices that are checked in, by id in bytewise order."""
        rows = self._db.rows(
            "SELECT device, profile FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL "
            "ORDER BY device",
            run,
        )
        return {row["device"]: row["profile"] for row in rows}

    def register(self, run: str, device: str, secret_hash: bytes, profile: bytes) -> bool:
        """Notes that a device is present; keeps the secret of its first check-in. False if the id has another one.

        As with `device_back`, a device that is revoked or to be forgotten is not present.
        """
        now = time.time()
        row = {"run": run, "device": device, "secret_hash": secret_hash, "profile": profile, "present": 0}
        with self._db.transaction():
            known = self.get(run, device)
            if known is not None and known["secret_hash"] != secret_hash:
                return False
            self._db.insert(
                "devices",
                {**row, "first_seen": now, "last_seen": now},
                "ON CONFLICT (run, device) DO UPDATE SET profile = excluded.profile",
            )
            self.mark_present(run, device)
        return True

    def mark_present(self, run: str, device: str) -> None:
        """A device that was taken for gone has called again; one that is revoked or to be forgotten stays gone."""
        sql = "UPDATE devices SET present = 1, last_seen = ? WHERE run = ? AND device = ? AND forget_asked_at IS NULL"
        self._db.write(f"{sql} AND NOT {REVOKED}", time.time(), run, device)

    def mark_gone(self, run: str, device: str, reason: str) -> None:
        """Ends a device's presence and closes its open asks."""
        with self._db.transaction():
            self._db.write(
                "UPDATE devices SET present = 0, last_seen = ? WHERE run = ? AND device = ?", time.time(), run, device
            )
            self._db.write(
                "UPDATE asks SET status = 'out', reason = ? WHERE run = ? AND device = ? AND status = 'open'",
                reason,
                run,
                device,
            )

    def note_seen(self, seen: Mapping[tuple[str, str], float]) -> None:
        """Writes when devices last called, by (run, device), in seconds since 1970."""
        with self._db.transaction():
            self._db.write_many(
                "UPDATE devices SET last_seen = max(coalesce(last_seen, 0), ?) WHERE run = ? AND device = ?",
                [(at, run, device) for (run, device), at in seen.items()],
            )

    def left_out(self, run: str, number: int) -> dict[str, int]:
        """Devices that are left out of a round because they were late again and again, with the last such round."""
        rows = self._db.rows(
            "SELECT device, left_out_until FROM devices WHERE run = ? AND left_out_until >= ? ORDER BY device",
            *(run, number),
        )
        return {row["device"]: row["left_out_until"] for row in rows}

    def ask_to_forget(self, run: str, device: str) -> bool:
        """Notes that a device is to be forgotten, and closes its open asks. False if the run has no such device."""
        with self._db.transaction():
            if self.get(run, device) is None:
                return False
            self._db.write(
                "UPDATE devices SET forget_asked_at = coalesce(forget_asked_at, ?) WHERE run = ? AND device = ?",
                time.time(),
                run,
                device,
            )
            self.mark_gone(run, device, "device to be forgotten")
        return True

    def to_forget(self, run: str) -> list[str]:
        """Devices that are to be forgotten and are not yet, in id order."""
        rows = self._db.rows(
            "SELECT device FROM devices WHERE run = ? AND forget_asked_at IS NOT NULL AND forgotten_at IS NULL "
            "ORDER BY device",
            run,
        )
        return [row["device"] for row in rows]

    def payloads_about(self, run: str, devices: Sequence[str]) -> set[bytes]:
        """Digests of what these devices have sent in a run, and of what it has told any device: that may be of them."""
        rows = self._db.rows(
            "SELECT payload AS sha256 FROM asks WHERE run = ?1 AND payload IS NOT NULL UNION SELECT u.sha256 FROM "
            "uploads u JOIN asks a ON u.ask = a.id WHERE a.run = ?1 AND a.device IN (SELECT value FROM json_each(?2))",
            *(run, json.dumps(list(devices))),
        )
        return {row["sha256"] for row in rows}

    def note_forgotten(self, run: str, device: str) -> bool:
        """Notes that nothing of a device is left; False if that was noted before."""
        sql = "UPDATE devices SET forgotten_at = ? WHERE run = ? AND device = ? AND forgotten_at IS NULL"
        return bool(self._db.write(sql, time.time(), run, device))
