"""Who calls, and who is present: secrets, leases, and when a device last called."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from functools import partial

from fleetdistill.errors import RefusedError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.intake.limiter import Limiter, Who
from fleetdistill_server.intake.refusal_log import RefusalLog
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store

_NOTE_SECONDS = 5.0
_COUNT_SECONDS = 1.0
# A sweep comes every second; this process stood still, or the disk did, where none came for so long.
_PAUSE_SECONDS = 5.0


class Sessions:
    """Devices that have checked in, and the contracts of their runs.

    Args:
        store: Read by every call.
        commit: Runs a job in a durable transaction.
        wake_engine: Called after something was committed that the engine may wait for.
        lease_seconds: A device that is silent for longer is taken for gone.
        limiter: Bounds new devices.
        refusals: Written down now and then.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        wake_engine: Callable[[], None],
        lease_seconds: float,
        limiter: Limiter,
        refusals: RefusalLog,
    ) -> None:
        self._store = store
        self._commit = commit
        self._wake_engine = wake_engine
        self.lease_seconds = lease_seconds
        self._limiter = limiter
        self._refusals = refusals
        self._registered: dict[str, tuple[int, float]] = {}
        self._contracts: dict[str, contract_pb2.Contract] = {}
        self._leases: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._noted = time.monotonic()
        self._swept: float | None = None
        self._paused = 0.0

    def forget_run(self, run: str) -> None:
        """Forgets the contract of a run that was deleted."""
        self._contracts.pop(run, None)

    def run_name(self, name: str) -> str:
        """The run that a device means; it need not name the only one. Raises RefusedError if there is not just one."""
        if name:
            return name
        runs = self._store.runs.names()
        if len(runs) != 1:
            listed = ", ".join(runs) or "none"
            raise RefusedError(Code.UNKNOWN_RUN if runs else Code.NOT_READY, f"name the run; the server has: {listed}")
        return runs[0]

    def contract(self, run: str) -> contract_pb2.Contract:
        """The run's contract. Raises RefusedError until the engine has prepared it."""
        if run not in self._contracts:
            row = self._store.runs.get(run)
            if row is None:
                raise unknown_run(run)
            if row["contract"] is None:
                raise RefusedError(Code.NOT_READY, f"run {run!r} is being prepared")
            self._contracts[run] = contract_pb2.Contract.FromString(row["contract"])
        return self._contracts[run]

    def authenticate(self, identity: service_pb2.Identity) -> tuple[str, str]:
        """Checks who calls and renews the lease, also one that had ended; returns run and device.

        Raises:
            RefusedError: The device never checked in to this run, or the secret is wrong.
        """
        caller = self.caller(identity)
        return caller["run"], caller["device"]

    def caller(self, identity: service_pb2.Identity) -> Row:
        """Does what `authenticate` does; returns the device's row as it was."""
        run = self.run_name(identity.run)
        row = self._store.devices.get(run, identity.device)
        if row is None or not hmac.compare_digest(row["secret_hash"], hashed(identity.secret)):
            # A server that was restored from a backup may not know a device any more, which then checks in again.
            details = {"check_in": "again"} if row is None else None
            text = f"device {identity.device!r} is not checked in with this secret"
            raise RefusedError(Code.BAD_IDENTITY, text, details)
        self.renew(run, identity.device)
        if not row["present"] and row["forget_asked_at"] is None:
            self._commit(lambda store: store.devices.mark_present(run, identity.device))
            self._wake_engine()
        return row

    def admit(self, run: str, device: str, secret: bytes, address: str) -> bytes:
        """The secret of a device that may check in, a new one if it has none. Raises RefusedError if it may not."""
        if not is_name(device):
            raise RefusedError(Code.BAD_IDENTITY, f"device id {device[:70]!r} must be {NAME_RULE}")
        row = self._store.devices.get(run, device)
        if row is None:
            self._check_room(run, device)
            self._limiter.begin_device(address)
            return secret or secrets.token_bytes(32)
        if not hmac.compare_digest(row["secret_hash"], hashed(secret)):
            raise id_taken(device)
        return secret

    def _check_room(self, run: str, device: str) -> None:
        """Whether a run takes one more device; counted now and then, not at every check-in."""
        now = time.monotonic()
        counted, at = self._registered.get(run, (0, -math.inf))
        if now - at > _COUNT_SECONDS:
            counted, at = self._registered[run] = self._store.devices.count(run), now
        self._limiter.check_devices((run, device), counted)

    def renew(self, run: str, device: str) -> None:
        """Begins a lease anew."""
        self._leases[run, device] = self._lease_clock() + self.lease_seconds
        self._seen[run, device] = time.time()

    def end(self, run: str, device: str, reason: str) -> None:
        """Ends a device's lease."""
        self._leases.pop((run, device), None)
        self._commit(lambda store: store.devices.mark_gone(run, device, reason))
        self._wake_engine()

    def adopt_present_devices(self) -> None:
        """Gives every device that was present before a restart a fresh lease."""
        for run in self._store.runs.names():
            for device in self._store.devices.present(run):
                self.renew(run, device)

    def end_leases(self) -> None:
        """Takes devices that were silent for too long for gone, all in one transaction.

        While this process or its disk stood still, no device could be heard: such a time counts for no lease.
        """
        self._note_seen()
        now, swept = time.monotonic(), self._swept
        self._swept = now
        if swept is not None:
            self._paused += max(now - swept - _PAUSE_SECONDS, 0.0)
        silent = self._silent(list(self._leases))
        if silent:
            for who in self._silent(self._commit(partial(self._end_leases_of, silent))):
                self._leases.pop(who, None)
            self._wake_engine()

    def _end_leases_of(self, devices: list[Who], store: Store) -> list[Who]:
        text = f"was silent for {self.lease_seconds:g} s"
        silent = self._silent(devices)  # whoever has called meanwhile is not
        for run, device in silent:
            if store.devices.get(run, device) is not None:
                store.devices.mark_gone(run, device, "lease ended")
                store.history.add_event(run, "lease-ended", f"{device} {text}", device=device)
        return silent

    def _silent(self, devices: list[Who]) -> list[Who]:
        now = self._lease_clock()
        return [who for who in devices if self._leases.get(who, math.inf) < now]

    def _lease_clock(self) -> float:
        """Seconds that do not go on while this process stands still."""
        return time.monotonic() - self._paused

    def _note_seen(self) -> None:
        """Writes down when devices last called; now and then, not at every call."""
        if self._seen and time.monotonic() - self._noted > _NOTE_SECONDS:
            seen, self._seen, self._noted = self._seen, {}, time.monotonic()
            self._commit(lambda store: store.devices.note_seen(seen))
            self._refusals.note_left_out()


def unknown_run(run: str) -> RefusedError:
    return RefusedError(Code.UNKNOWN_RUN, f"the server has no run {run!r}")


def id_taken(device: str) -> RefusedError:
    return RefusedError(
        Code.BAD_IDENTITY, f"device id {device!r} belongs to another device; choose another id or restore its secret"
    )


def hashed(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
