"""Limits the load of one device and of all devices together.

Limits per device apply after authentication, so that no caller can use up another device's share. Calls before
authentication are bounded by gRPC's limits (`front/server.py`); enrolment and check-ins of new devices have
shared limits here.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import AFTER_SECONDS, Code
from fleetdistill_server.config.limits import Limits

DeviceKey = tuple[str, str]
"""Names of a run and of a device in it."""

_ALL: DeviceKey = ("", "")
_MINUTE, _HOUR = 60.0, 3600.0
# Seconds after which to retry when the limit frees up as soon as another call ends.
_SOON_SECONDS = 5.0
_MAX_KEYS = 200_000


class Reservation(AbstractContextManager["Reservation"]):
    """A share of a limit, held until `release` or the end of a `with` block; releasing twice has no effect."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Returns the share to the limit."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __exit__(self, *_: object) -> None:
        self.release()


class Allowance:
    """A token bucket per key: `most` tokens that refill evenly over `seconds`."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic, seconds: float = _HOUR) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._left: dict[DeviceKey, tuple[float, float]] = {}

    def take(self, key: DeviceKey) -> float:
        """Takes a token and returns 0, or returns the seconds until one is available."""
        now = self._clock()
        if len(self._left) > _MAX_KEYS:  # a missing entry stands for a full bucket
            self._left = {one: (left, at) for one, (left, at) in self._left.items() if not self._is_full(left, at, now)}
        left, since = self._left.get(key, (float(self._most), now))
        left = min(self._most, left + (now - since) * self._most / self._seconds)
        taken = left >= 1
        self._left[key] = (left - taken, now)
        return 0.0 if taken else (1 - left) * self._seconds / self._most

    def _is_full(self, left: float, since: float, now: float) -> bool:
        return left + (now - since) * self._most / self._seconds >= self._most

    def give_back(self, key: DeviceKey) -> None:
        """Returns a token that was taken but not used."""
        left, since = self._left[key]
        self._left[key] = (left + 1, since)


class _Usage:
    """Counts a resource's use by each device and by all devices."""

    def __init__(self) -> None:
        self.by: Counter[DeviceKey] = Counter()
        self.all = 0

    def add(self, key: DeviceKey, amount: int) -> None:
        self.by[key] += amount
        self.all += amount
        if self.by[key] <= 0:
            del self.by[key]


class Limiter:
    """Enforces limits on calls, uploads, enrolments and new devices. Thread-safe.

    Args:
        limits: The limits; None for no limits, as in a simulation.
        clock: Returns monotonic seconds.
    """

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._calls = _Usage()
        self._bytes = _Usage()
        self._enrolments = _Usage()
        known = limits or Limits()
        self._uploads = Allowance(known.uploads_per_hour_per_device, clock)
        self._all_uploads = Allowance(known.uploads_per_hour, clock)
        self._enrolled = Allowance(known.enrolments_per_minute, clock, _MINUTE)
        self._new_devices = Allowance(known.new_devices_per_minute, clock, _MINUTE)
        self._new_of_address = Allowance(known.new_devices_per_minute_per_address, clock, _MINUTE)

    def open_call(self, key: DeviceKey) -> Reservation:
        """Reserves a long-lived call.

        Raises:
            RefusedError: `too-many`: the device or all devices have the maximum number of open calls.
        """
        if self.limits is None:
            return Reservation(lambda: None)
        with self._lock:
            _check(self._calls.by[key] + 1, self.limits.open_calls_per_device, key, "open calls")
            _check(self._calls.all + 1, self.limits.open_calls, key, "open calls of all devices")
            return self._take(self._calls, key, 1)

    def begin_upload(self, key: DeviceKey) -> None:
        """Counts a new upload.

        Raises:
            RefusedError: `too-many`: the device or all devices have started the maximum number of uploads per hour.
        """
        if self.limits is None:
            return
        with self._lock:
            # The device's own limit comes first, so that a device that exceeds it does not use up the shared limit.
            _take_one(self._uploads, key, self.limits.uploads_per_hour_per_device, "uploads within an hour")
            try:
                _take_one(self._all_uploads, _ALL, self.limits.uploads_per_hour, "uploads within an hour")
            except RefusedError:
                self._uploads.give_back(key)
                raise

    def begin_enrolment(self) -> Reservation:
        """Reserves an enrolment. Callers are not authenticated yet, so all of them share one limit.

        Raises:
            RefusedError: `too-many`: the maximum number of enrolments is in progress or was started in this minute.
        """
        if self.limits is None:
            return Reservation(lambda: None)
        with self._lock:
            _check(self._enrolments.all + 1, self.limits.enrolments_at_once, _ALL, "enrolments in progress")
            _take_one(self._enrolled, _ALL, self.limits.enrolments_per_minute, "enrolments within a minute")
            return self._take(self._enrolments, _ALL, 1)

    def begin_device(self, address: str) -> None:
        """Counts the check-in of a new device id; without TLS any caller can invent ids at no cost.

        Raises:
            RefusedError: `too-many`: the address or all addresses have used the maximum number of new ids per minute.
        """
        if self.limits is None:
            return
        with self._lock:
            key = ("", address)
            most = self.limits.new_devices_per_minute_per_address
            _take_one(self._new_of_address, key, most, "check-ins of new ids within a minute")
            try:
                most = self.limits.new_devices_per_minute
                _take_one(self._new_devices, _ALL, most, "check-ins of new ids within a minute")
            except RefusedError:
                self._new_of_address.give_back(key)
                raise

    def hold_bytes(self, key: DeviceKey, size: int) -> Reservation:
        """Reserves `size` bytes for an upload; the only upload in progress may have any size.

        Raises:
            RefusedError: `too-many`: the uploads in progress have too many bytes.
        """
        if self.limits is None:
            return Reservation(lambda: None)
        counted = max(size, 1)
        with self._lock:
            if self._bytes.by[key]:
                most = self.limits.bytes_in_flight_per_device
                _check(self._bytes.by[key] + counted, most, key, "bytes of uploads in progress")
            if self._bytes.all:
                most = self.limits.bytes_in_flight
                _check(self._bytes.all + counted, most, key, "bytes of all devices' uploads in progress")
            return self._take(self._bytes, key, counted)

    def check_devices(self, key: DeviceKey, known: int) -> None:
        """Checks that a run with `known` devices may have one more.

        Raises:
            RefusedError: `too-many`: the run has the maximum number of devices.
        """
        if self.limits is not None and known >= self.limits.devices:
            text = f"cannot join: the run has {known} devices, the limit is {self.limits.devices}"
            raise too_many(key, text, _SOON_SECONDS)

    def _take(self, usage: _Usage, key: DeviceKey, amount: int) -> Reservation:
        usage.add(key, amount)
        return Reservation(lambda: self._give_back(usage, key, amount))

    def _give_back(self, usage: _Usage, key: DeviceKey, amount: int) -> None:
        with self._lock:
            usage.add(key, -amount)


def _check(wanted: int, most: int, key: DeviceKey, what: str) -> None:
    if wanted > most:
        raise too_many(key, f"would have {wanted} {what}, the limit is {most}", _SOON_SECONDS)


def _take_one(allowance: Allowance, key: DeviceKey, most: int, what: str) -> None:
    wait = allowance.take(key)
    if wait:
        raise too_many(key, f"has started {most} {what}", wait)


def too_many(key: DeviceKey, what: str, after_seconds: float) -> RefusedError:
    """Returns the error for a call beyond a limit of a device or of all devices, with the seconds until a retry."""
    details = {"device": key[1]} if key != _ALL else {}
    name = f"device {key[1]}" if key[0] else key[1] or "the server"
    text = f"{name} {what}; retry in {math.ceil(after_seconds)} s"
    return RefusedError(Code.TOO_MANY, text, {**details, AFTER_SECONDS: f"{after_seconds:.3f}"})
