"""Authenticates devices, and tracks their leases, last calls, and the times of their asks."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from fleetdistill.errors import RefusedError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.intake.limiter import DeviceKey, Limiter
from fleetdistill_server.intake.refusal_log import RefusalLog
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.records import Device
from fleetdistill_server.store.states import OVER
from fleetdistill_server.store.store import Store

SECRET_BYTES = 32
_NOTE_SECONDS = 5.0
_COUNT_SECONDS = 1.0
_CONTRACT_SECONDS = 5.0  # another server of the same store may change a run's contract
_CLOCKS_SECONDS = 1.0  # a call later than the last known one by more than this went to another front
_ENDED_AT_ONCE = 100  # leases that end in one transaction, so that thousands do not delay other writes


# `end_leases` runs every second; after a longer gap this process or its disk was suspended.
_PAUSE_SECONDS = 5.0


class Sessions:
    """Authenticates devices, tracks which ones are present, and caches their runs' contracts.

    Several fronts may serve one store. Each has leases for all present devices. A lease that ends here is extended if
    the store has a later call, which went to another front.

    Args:
        store: Store that contains the runs.
        commit: Runs a job in a durable transaction.
        wake_engine: Called after a commit that the engine may be waiting for.
        lease_seconds: Seconds without a call after which a device counts as gone.
        limiter: Limits the number of new devices.
        refusals: Log of refusals, whose counts are written every few seconds.
        clock: Returns monotonic seconds.

    Attributes:
        served_run: Returns the only run that a server is serving from the store, or None; set by the front.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        wake_engine: Callable[[], None],
        lease_seconds: float,
        limiter: Limiter,
        refusals: RefusalLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._store = store
        self._commit = commit
        self._wake_engine = wake_engine
        self.lease_seconds = lease_seconds
        self._limiter = limiter
        self._refusals = refusals
        self.served_run: Callable[[], str | None] = lambda: None
        self._registered: dict[str, tuple[int, float]] = {}
        self._contracts: dict[str, tuple[contract_pb2.Contract, float]] = {}
        self._leases: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], float] = {}  # calls that the store does not have yet
        self._called: dict[tuple[str, str], float] = {}  # last calls that this front knows of
        self._noted = self._adopted = clock()
        self._swept: float | None = None
        self._paused = 0.0

    def forget_run(self, run: str) -> None:
        """Drops the cached contract of a deleted run."""
        self._contracts.pop(run, None)

    def run_name(self, name: str) -> str:
        """Returns the name of a device's run; an empty name selects the only one, or the served one.

        Only if all runs have ended, ended ones are selected too.

        Raises:
            RefusedError: The name is empty and the server has no run, or several to choose from.
        """
        if name:
            return name
        runs = self._store.runs.names()
        if not runs:
            raise RefusedError(Code.NOT_READY, "the server has no run yet")
        current = self._store.runs.names(without=OVER) or runs
        served = self.served_run() if len(current) > 1 else None
        if served in current:
            return served
        if len(current) > 1:
            listed = ", ".join(current)
            raise RefusedError(
                Code.UNKNOWN_RUN, f"the server has several runs; set Server(run=...) to one of: {listed}"
            )
        return current[0]

    def contract(self, run: str) -> contract_pb2.Contract:
        """Returns a run's contract.

        Raises:
            RefusedError: The run does not exist, or the engine has not published its contract yet.
        """
        known = self._contracts.get(run)
        if known is not None and self._clock() - known[1] < _CONTRACT_SECONDS:
            return known[0]
        known_run = self._store.runs.get(run)
        if known_run is None:
            raise unknown_run(run, self._store.runs.names(without=OVER))
        if not known_run.contract:
            raise RefusedError(Code.NOT_READY, f"run {run!r} is being prepared")
        contract = contract_pb2.Contract.FromString(known_run.contract)
        self._contracts[run] = (contract, self._clock())
        return contract

    def authenticate(self, identity: service_pb2.Identity) -> tuple[str, str]:
        """Authenticates a device and renews its lease, even an expired one; returns the names of run and device.

        Raises:
            RefusedError: The device never checked in to this run, or the secret is wrong.
        """
        caller = self.caller(identity)
        return caller.run, caller.id

    def caller(self, identity: service_pb2.Identity) -> Device:
        """Authenticates a device like `authenticate`; returns the device as it was before the call."""
        run = self.run_name(identity.run)
        known = self._store.devices.get(run, identity.device)
        if known is None or not hmac.compare_digest(known.secret_hash, hash_name(identity.secret)):
            text = f"the server has no check-in of device {identity.device!r} with this secret"
            if known is None:  # such as a server whose store was restored from a backup
                raise RefusedError(Code.BAD_IDENTITY, f"{text}; it must check in again", {"check_in": "again"})
            raise RefusedError(Code.BAD_IDENTITY, text)
        self.renew(run, identity.device)
        if not known.is_present and known.forget_asked_at is None:
            self.mark_present(run, identity.device)
        return known

    def mark_present(self, run: str, device: str) -> None:
        """Marks a device that has checked in as present again, and renews its lease."""
        self.renew(run, device)
        self._commit(lambda store: store.devices.mark_present(run, device))
        self._wake_engine()

    def admit(self, run: str, device: str, secret: bytes, address: str) -> bytes:
        """Returns the secret for a device's check-in: the given one, or a new one for a new device without a secret.

        Raises:
            RefusedError: The id or secret is not valid, the id belongs to another device, or there are too many.
        """
        if not is_name(device):
            raise RefusedError(Code.BAD_IDENTITY, f"device id {device[:70]!r} must be {NAME_RULE}")
        known = self._store.devices.get(run, device)
        if known is None:
            if len(secret) not in (0, SECRET_BYTES):
                text = f"the secret of device {device!r} has {len(secret)} bytes, must be {SECRET_BYTES} random ones"
                raise RefusedError(Code.BAD_IDENTITY, text)
            self._check_device_limit(run, device)
            self._limiter.begin_device(address)
            return secret or secrets.token_bytes(SECRET_BYTES)
        if not hmac.compare_digest(known.secret_hash, hash_name(secret)):
            raise id_taken(device)
        return secret

    def _check_device_limit(self, run: str, device: str) -> None:
        """Raises RefusedError if the run has the maximum number of devices; the count is at most 1 s old."""
        now = self._clock()
        counted, at = self._registered.get(run, (0, -math.inf))
        if now - at > _COUNT_SECONDS:
            counted, at = self._registered[run] = self._store.devices.count(run), now
        self._limiter.check_devices((run, device), counted)

    def renew(self, run: str, device: str) -> None:
        """Renews a device's lease and notes the time of its call."""
        self._leases[run, device] = self._lease_clock() + self.lease_seconds
        self._seen[run, device] = self._called[run, device] = self._store.database.now()

    def end(self, run: str, device: str, reason: str) -> None:
        """Ends a device's lease and marks the device as gone."""
        self._leases.pop((run, device), None)
        self._called.pop((run, device), None)
        self._commit(lambda store: store.devices.mark_absent(run, device, reason))
        self._wake_engine()

    def adopt_present_devices(self) -> None:
        """Gives a lease to every present device without one: after a restart, or after a call to another front."""
        self._adopted = self._clock()
        for run in self._store.runs.names():
            for device, last_seen in self._store.devices.last_calls(run).items():
                self._leases.setdefault((run, device), self._lease_clock() + self.lease_seconds)
                self._called.setdefault((run, device), last_seen)

    def end_leases(self) -> None:
        """Marks devices with an expired lease as gone; call every second.

        Time during which this process or its disk was suspended does not count towards leases.
        """
        self._note_seen()
        now = self._clock()
        swept = self._swept
        self._swept = now
        if swept is not None:
            self._paused += max(now - swept - _PAUSE_SECONDS, 0.0)
        silent = self._silent(list(self._leases))
        if silent:
            self.end_leases_of(silent)
        if now - self._adopted > self.lease_seconds:
            self.adopt_present_devices()

    def end_leases_of(self, devices: list[DeviceKey]) -> None:
        """Marks those of the devices as gone whose lease has expired."""
        for start in range(0, len(devices), _ENDED_AT_ONCE):
            group = devices[start : start + _ENDED_AT_ONCE]
            for key in self._silent(self._commit(partial(self._end_silent, group))):
                self._leases.pop(key, None)
                self._called.pop(key, None)
        self._wake_engine()

    def _end_silent(self, devices: list[DeviceKey], store: Store) -> list[DeviceKey]:
        text = f"made no call for {self.lease_seconds:g} s"
        for run, device in self._silent(devices):  # excludes devices that have called in the meantime
            known = store.devices.get(run, device)
            if known is not None and not self._is_called_elsewhere(known) and known.is_present:
                store.devices.mark_absent(run, device, "lease ended")
                store.history.add_event(run, "lease-ended", f"{device} {text}", device=device)
        return self._silent(devices)

    def _is_called_elsewhere(self, device: Device) -> bool:
        """Extends the lease of a device that has called another front; returns False for any other device."""
        key, last = (device.run, device.id), device.last_seen
        left = min(last + self.lease_seconds - self._store.database.now(), self.lease_seconds)
        if left <= 0 or last <= self._called.get(key, 0.0) + _CLOCKS_SECONDS:
            return False
        self._leases[key] = self._lease_clock() + left
        return True

    def _silent(self, devices: list[DeviceKey]) -> list[DeviceKey]:
        now = self._lease_clock()
        return [key for key in devices if self._leases.get(key, math.inf) < now]

    def _lease_clock(self) -> float:
        """Returns monotonic seconds, without those during which this process was suspended."""
        return self._clock() - self._paused

    def _note_seen(self) -> None:
        """Records when each device last called, every `_NOTE_SECONDS` to limit writes, and often within a lease.

        Refusals are counted then, too, also if no device was seen: those of revoked devices are no calls of a device.
        """
        if self._clock() - self._noted > min(_NOTE_SECONDS, self.lease_seconds / 4):
            seen, self._seen, self._noted = self._seen, {}, self._clock()
            if seen:
                self._commit(lambda store: store.devices.record_last_seen(seen))
            self._refusals.note_left_out()


def unknown_run(run: str, others: Sequence[str] = ()) -> RefusedError:
    """Returns the error for a run that does not exist, with up to ten that a device may name instead."""
    text = f"the server has no run {run!r}"
    if others:
        text += f", only {', '.join(others[:10])}; set Server(run=...) to one of these, with its own state directory"
    return RefusedError(Code.UNKNOWN_RUN, text)


def id_taken(device: str) -> RefusedError:
    """Returns the error for a device id that was registered with another secret."""
    return RefusedError(
        Code.BAD_IDENTITY,
        f"device id {device!r} belongs to another device; choose another id or restore this device's secret",
    )


def hash_name(secret: bytes) -> bytes:
    """Returns the SHA-256 of a device's secret, which the store keeps instead of the secret."""
    return hashlib.sha256(secret).digest()


SENT, DOWNLOAD, DOWNLOADED, UPLOAD = "sent_at", "download_at", "downloaded_at", "upload_at"


# --- Notes when devices receive their asks, download, and upload, and writes the times every second.
#
# The times are only shown to people. They are therefore kept in memory and written together, instead of in a durable
# transaction for each: a crash loses those of the last second.

_MOST = 100_000
"""Largest number of times in memory; while the store cannot be written, later ones are not kept."""


class AskTimes:
    """Collects times of asks; thread-safe.

    Args:
        commit: Runs a job in a durable transaction.
    """

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._times: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()

    def note(self, ask: int, what: str) -> None:
        """Notes the first time of a step of an ask, one of the constants of this module."""
        with self._lock:
            if len(self._times) < _MOST:
                self._times.setdefault((ask, what), time.time())

    def write(self) -> None:
        """Writes the times to the store. Raises StoreError; the times are then kept for the next call."""
        with self._lock:
            times, self._times = self._times, {}
        if not times:
            return
        try:
            self._commit(lambda store: store.asks.record_times(times))
        except BaseException:
            with self._lock:
                self._times = {**self._times, **times}
            raise
