"""Devices of a run: presence, back-off and forgetting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleetdistill_server.store.credentials import REVOKED
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.records import Device
from fleetdistill_server.store.states import AT_REST, OVER, sql_list

HAS_ITS_DEVICES = (
    "(waits_for > 0 AND waits_for <= (SELECT count(*) FROM devices WHERE run = name AND present = 1 "
    "AND forget_asked_at IS NULL))"
)
"""Condition on a row of `runs` that waits for a number of devices: they are present."""
WAITS_NO_MORE = "waits_since = NULL, waits_for = NULL, waits_until = NULL"
"""Assignments to a row of `runs` that ends its wait."""


_MAX_NAMES = 500
"""Largest number of devices that one statement names; databases limit its values."""


class Devices:
    """Reads and writes the table `devices`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, run: str, device: str) -> Device | None:
        """Returns a device of a run, or None."""
        row = self._db.row("SELECT * FROM devices WHERE run = ? AND device = ?", run, device)
        return None if row is None else Device.from_row(row)

    def all(self, run: str) -> list[Device]:
        """Returns all devices of a run, ordered by id."""
        rows = self._db.rows("SELECT * FROM devices WHERE run = ? ORDER BY device", run)
        return [Device.from_row(row) for row in rows]

    def without_work(self, devices: Collection[str]) -> set[str]:
        """Returns which of these devices have been in runs, but only in such as are over or have forgotten them."""
        works = f"r.status NOT IN ({sql_list(OVER)}) AND d.forget_asked_at IS NULL"
        of_runs = "SELECT d.device FROM devices d JOIN runs r ON r.name = d.run"
        without = self._db.column(f"{of_runs} GROUP BY d.device HAVING max(CASE WHEN {works} THEN 1 ELSE 0 END) = 0")
        return set(without) & set(devices)

    def count(self, run: str) -> int:
        """Returns how many devices have ever checked in to a run."""
        return int(self._db.value("SELECT count(*) FROM devices WHERE run = ?", run))

    def present(self, run: str) -> list[str]:
        """Returns the ids of the devices that are checked in, in bytewise order."""
        sql = "SELECT device FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL ORDER BY device"
        return self._db.column(sql, run)

    def last_calls(self, run: str) -> dict[str, float]:
        """Returns when the devices that are checked in last called, in seconds since 1970, by id."""
        rows = self._db.rows("SELECT device, last_seen FROM devices WHERE run = ? AND present = 1", run)
        return {row["device"]: row["last_seen"] or 0.0 for row in rows}

    def present_profiles(self, run: str) -> dict[str, bytes]:
        """Returns the serialized profiles of the devices that are checked in, by id in bytewise order."""
        rows = self._db.rows(
            "SELECT device, profile FROM devices WHERE run = ? AND present = 1 AND forget_asked_at IS NULL "
            "ORDER BY device",
            run,
        )
        return {row["device"]: row["profile"] for row in rows}

    def ids(self, run: str) -> set[str]:
        """Returns the ids of all devices of a run."""
        return set(self._db.column("SELECT device FROM devices WHERE run = ?", run))

    def profiles(self, run: str, devices: Sequence[str]) -> dict[str, bytes]:
        """Returns the serialized profiles of devices of a run, by id in the order of `devices`."""
        result: dict[str, bytes] = {}
        for at in range(0, len(devices), _MAX_NAMES):
            some = devices[at : at + _MAX_NAMES]
            sql = f"SELECT device, profile FROM devices WHERE run = ? AND device IN ({', '.join('?' * len(some))})"
            found = {row["device"]: row["profile"] for row in self._db.rows(sql, run, *some)}
            result |= {device: found[device] for device in some if device in found}
        return result

    def register_new(self, run: str, devices: Sequence[tuple[str, bytes, bytes]]) -> None:
        """Stores devices that are not known yet, as present, in one transaction.

        Args:
            run: Name of the run.
            devices: Id, hash of the secret, and serialized profile of each device.
        """
        now = self._db.now()
        with self._db.transaction():
            self._db.insert_many(
                "devices",
                (
                    {
                        "run": run,
                        "device": device,
                        "secret_hash": secret_hash,
                        "profile": profile,
                        "present": 1,
                        "first_seen": now,
                        "last_seen": now,
                    }
                    for device, secret_hash, profile in devices
                ),
            )
            self._end_wait(run)

    def register(self, run: str, device: str, secret_hash: bytes, profile: bytes) -> bool:
        """Marks a device as present and stores its profile; its first check-in also stores the hash of its secret.

        As with `mark_present`, a device that is revoked or is to be forgotten stays absent.

        Returns:
            False if the id is already registered with another secret.
        """
        now = self._db.now()
        row = {"run": run, "device": device, "secret_hash": secret_hash, "profile": profile, "present": 0}
        with self._db.transaction():
            known = self.get(run, device)
            if known is not None and known.secret_hash != secret_hash:
                return False
            self._db.insert(
                "devices",
                {**row, "first_seen": now, "last_seen": now},
                "ON CONFLICT (run, device) DO UPDATE SET profile = excluded.profile",
            )
            self.mark_present(run, device)
        return True

    def mark_present(self, run: str, device: str) -> None:
        """Marks an absent device as present again, unless it is revoked or to be forgotten."""
        sql = "UPDATE devices SET present = 1, last_seen = ? WHERE run = ? AND device = ? AND forget_asked_at IS NULL"
        with self._db.transaction():
            self._db.write(f"{sql} AND NOT {REVOKED}", self._db.now(), run, device)
            self._end_wait(run)

    def mark_absent(self, run: str, device: str, reason: str) -> None:
        """Marks a device as absent and closes its open asks with this reason."""
        with self._db.transaction():
            self._db.write(
                "UPDATE devices SET present = 0 WHERE run = ? AND device = ?",
                run,
                device,
            )
            self._db.write(
                "UPDATE asks SET status = 'out', reason = ? WHERE run = ? AND device = ? AND status = 'open'",
                reason,
                run,
                device,
            )
            self._end_wait(run)

    def _end_wait(self, run: str, condition: str = f"(waits_for = 0 OR {HAS_ITS_DEVICES})") -> None:
        """Ends a run's wait for devices after a change; without an engine, it joins the end of the queue."""
        self._db.write(
            f"UPDATE runs SET queued_at = CASE WHEN engine IS NULL THEN ? ELSE queued_at END, {WAITS_NO_MORE} "
            f"WHERE name = ? AND waits_since IS NOT NULL AND {condition}",
            *(self._db.now(), run),
        )

    def record_last_seen(self, seen: Mapping[tuple[str, str], float]) -> None:
        """Stores when devices last made a call: seconds since 1970 by (run, device)."""
        with self._db.transaction():
            self._db.write_many(
                "UPDATE devices SET last_seen = ? WHERE run = ? AND device = ? AND coalesce(last_seen, 0) < ?",
                [(at, run, device, at) for (run, device), at in seen.items()],
            )

    def left_out(self, run: str, number: int) -> dict[str, int]:
        """Returns the devices that a round leaves out after missed deadlines, each with the last such round."""
        rows = self._db.rows(
            "SELECT device, left_out_until FROM devices WHERE run = ? AND left_out_until >= ? AND left_out_until > 0 "
            "ORDER BY device",
            *(run, number),
        )
        return {row["device"]: row["left_out_until"] for row in rows}

    def ask_to_forget(self, run: str, device: str) -> bool:
        """Requests that a device be forgotten and closes its open asks. Returns False for an unknown device."""
        with self._db.transaction():
            if self.get(run, device) is None:
                return False
            self._db.write(
                "UPDATE devices SET forget_asked_at = coalesce(forget_asked_at, ?) WHERE run = ? AND device = ?",
                self._db.now(),
                run,
                device,
            )
            self.mark_absent(run, device, "device to be forgotten")
            self._end_wait(run, "1 = 1")  # the engine forgets it
        return True

    def to_forget(self, run: str) -> list[str]:
        """Returns the devices with a pending request to be forgotten, ordered by id."""
        rows = self._db.rows(
            "SELECT device FROM devices WHERE run = ? AND forget_asked_at IS NOT NULL AND forgotten_at IS NULL "
            "ORDER BY device",
            run,
        )
        return [row["device"] for row in rows]

    def runs_to_forget_in(self) -> list[str]:
        """Returns the runs at rest, which no engine works on, that have devices to forget, ordered by name."""
        rows = self._db.rows(
            "SELECT DISTINCT d.run AS run FROM devices d JOIN runs r ON r.name = d.run "
            "WHERE d.forget_asked_at IS NOT NULL AND d.forgotten_at IS NULL AND r.checkpoint IS NOT NULL "
            f"AND r.status IN ({sql_list(AT_REST)}) ORDER BY d.run"
        )
        return [row["run"] for row in rows]

    def payloads_with_data_of(self, run: str, devices: Sequence[str]) -> set[bytes]:
        """Returns digests of the payloads that can contain data of these devices.

        These are the devices' own uploads and every payload that the run sent to any device.
        """
        asked = self._db.rows("SELECT DISTINCT payload FROM asks WHERE run = ? AND payload IS NOT NULL", run)
        answers = "SELECT u.sha256 FROM uploads u JOIN asks a ON u.ask = a.id WHERE a.run = ? AND a.device = ?"
        uploaded = [row["sha256"] for device in devices for row in self._db.rows(answers, run, device)]
        return {row["payload"] for row in asked}.union(uploaded)

    def mark_forgotten(self, run: str, device: str) -> bool:
        """Records that a device is forgotten; returns False if this was already recorded."""
        sql = "UPDATE devices SET forgotten_at = ? WHERE run = ? AND device = ? AND forgotten_at IS NULL"
        return bool(self._db.write(sql, self._db.now(), run, device))
