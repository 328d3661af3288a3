"""What one device, and all devices together, may ask of the server at a time.

Only devices that have shown who they are count here, so nobody can use up another one's share. What others may cost is
bounded before any of our code runs, by gRPC's own limits (`front/grpc_options.py`); the one call
that is theirs, to enrol, has a small allowance for all of them together.
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

Who = tuple[str, str]
"""A device of a run: (run, device)."""

_ALL: Who = ("", "")
_MINUTE, _HOUR = 60.0, 3600.0
# When to come back for a place that frees itself when another call ends.
_SOON_SECONDS = 5.0
_MOST_KEYS = 200_000


class Place(AbstractContextManager["Place"]):
    """A share of a limit that is held until `release`, or the end of a block; releasing twice does nothing."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Gives the share back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __exit__(self, *_: object) -> None:
        self.release()


class Allowance:
    """So many in a span of time, an hour if nothing else is said, for each key; all at once if need be."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic, seconds: float = _HOUR) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._left: dict[Who, tuple[float, float]] = {}

    def take(self, who: Who) -> float:
        """Takes one and returns 0, or returns the seconds after which there will be one."""
        now = self._clock()
        if len(self._left) > _MOST_KEYS:  # whoever has all of it again is as good as unknown
            self._left = {one: (left, at) for one, (left, at) in self._left.items() if not self._is_full(left, at, now)}
        left, since = self._left.get(who, (float(self._most), now))
        left = min(self._most, left + (now - since) * self._most / self._seconds)
        taken = left >= 1
        self._left[who] = (left - taken, now)
        return 0.0 if taken else (1 - left) * self._seconds / self._most

    def _is_full(self, left: float, since: float, now: float) -> bool:
        return left + (now - since) * self._most / self._seconds >= self._most

    def give_back(self, who: Who) -> None:
        """Undoes a `take` of one that was not used."""
        left, since = self._left[who]
        self._left[who] = (left + 1, since)


class _Held:
    """How much each device holds of one thing, and all of them."""

    def __init__(self) -> None:
        self.by: Counter[Who] = Counter()
        self.all = 0

    def add(self, who: Who, amount: int) -> None:
        self.by[who] += amount
        self.all += amount
        if self.by[who] <= 0:
            del self.by[who]


class Limiter:
    """Counts what is under way and refuses what goes over a limit. May be used from any thread.

    Args:
        limits: The limits; None for no limit, as in a simulation.
        clock: Seconds that only go forward.
    """

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._calls, self._bytes, self._enrolments = _Held(), _Held(), _Held()
        known = limits or Limits()
        self._uploads = Allowance(known.uploads_per_hour_per_device, clock)
        self._all_uploads = Allowance(known.uploads_per_hour, clock)
        self._enrolled = Allowance(known.enrolments_per_minute, clock, _MINUTE)
        self._new_devices = Allowance(known.new_devices_per_minute, clock, _MINUTE)
        self._new_of_address = Allowance(known.new_devices_per_minute_per_address, clock, _MINUTE)

    def open_call(self, who: Who) -> Place:
        """A place for a call that stays open for a while.

        Raises:
            RefusedError: `too-many`: the device, or all together, have as many open as they may.
        """
        if self.limits is None:
            return Place(lambda: None)
        with self._lock:
            _check(self._calls.by[who] + 1, self.limits.open_calls_per_device, who, "open calls")
            _check(self._calls.all + 1, self.limits.open_calls, who, "open calls of all devices")
            return self._take(self._calls, who, 1)

    def begin_upload(self, who: Who) -> None:
        """Counts an upload that begins.

        Raises:
            RefusedError: `too-many`: the device, or all together, have begun as many in this hour as they may.
        """
        if self.limits is None:
            return
        with self._lock:
            # The device's own share first: who has used it up takes nothing from the others.
            _take_one(self._uploads, who, self.limits.uploads_per_hour_per_device, "uploads within an hour")
            try:
                _take_one(self._all_uploads, _ALL, self.limits.uploads_per_hour, "uploads within an hour")
            except RefusedError:
                self._uploads.give_back(who)
                raise

    def begin_enrolment(self) -> Place:
        """A place for an enrolment. Who asks for it has shown nothing yet, so all share one allowance.

        Raises:
            RefusedError: `too-many`: as many are under way, or were begun in this minute, as may be.
        """
        if self.limits is None:
            return Place(lambda: None)
        with self._lock:
            _check(self._enrolments.all + 1, self.limits.enrolments_at_once, _ALL, "enrolments under way")
            _take_one(self._enrolled, _ALL, self.limits.enrolments_per_minute, "enrolments within a minute")
            return self._take(self._enrolments, _ALL, 1)

    def begin_device(self, address: str) -> None:
        """Counts an id that a run does not know yet, which costs whoever calls nothing in plain text.

        Raises:
            RefusedError: `too-many`: one address, or all together, have brought as many in this minute as they may.
        """
        if self.limits is None:
            return
        with self._lock:
            who = ("", address)
            most = self.limits.new_devices_per_minute_per_address
            _take_one(self._new_of_address, who, most, "check-ins of new ids within a minute")
            try:
                most = self.limits.new_devices_per_minute
                _take_one(self._new_devices, _ALL, most, "check-ins of new ids within a minute")
            except RefusedError:
                self._new_of_address.give_back(who)
                raise

    def hold_bytes(self, who: Who, size: int) -> Place:
        """A place for an upload of `size` bytes. One of a device, and one of all, may be of any size.

        Raises:
            RefusedError: `too-many`: too many bytes are under way.
        """
        if self.limits is None:
            return Place(lambda: None)
        counted = max(size, 1)
        with self._lock:
            if self._bytes.by[who]:
                most = self.limits.bytes_in_flight_per_device
                _check(self._bytes.by[who] + counted, most, who, "bytes of uploads under way")
            if self._bytes.all:
                most = self.limits.bytes_in_flight
                _check(self._bytes.all + counted, most, who, "bytes of all devices' uploads under way")
            return self._take(self._bytes, who, counted)

    def check_devices(self, who: Who, known: int) -> None:
        """Refuses a new device of a run that has as many as it may."""
        if self.limits is not None:
            _check(known + 1, self.limits.devices, who, "devices in the run beside it")

    def _take(self, held: _Held, who: Who, amount: int) -> Place:
        held.add(who, amount)
        return Place(lambda: self._give_back(held, who, amount))

    def _give_back(self, held: _Held, who: Who, amount: int) -> None:
        with self._lock:
            held.add(who, -amount)


def _check(wanted: int, most: int, who: Who, what: str) -> None:
    if wanted > most:
        raise too_many(who, f"would have {wanted} {what}, the limit is {most}", _SOON_SECONDS)


def _take_one(allowance: Allowance, who: Who, most: int, what: str) -> None:
    wait = allowance.take(who)
    if wait:
        raise too_many(who, f"has begun {most} {what}", wait)


def too_many(who: Who, what: str, after_seconds: float) -> RefusedError:
    """The refusal of what goes over the share of a device, or of all, with the moment to come back at."""
    details = {"device": who[1]} if who != _ALL else {}
    name = f"device {who[1]}" if who[0] else who[1] or "the server"
    text = f"{name} {what}; come back in {math.ceil(after_seconds)} s"
    return RefusedError(Code.TOO_MANY, text, {**details, AFTER_SECONDS: f"{after_seconds:.3f}"})
