"""Reads requests within a size per method, a deadline and a memory quota.

gRPC keeps the received part of a request in memory while its call is open. A request that is not complete within
`_QUICK_SECONDS` therefore needs one of a limited number of slots. If no slot is free, the oldest slow
request of the caller with the most slots is rejected. Requests that arrive faster need no slot and never wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import CHUNK_BYTES
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.intake.limiter import too_many

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of any call, an upload's header; gRPC has no limits per method."""
ENROLMENT_BYTES = 16 << 10
"""Largest message on the enrolment port, enforced by gRPC."""
_USUAL_BYTES = 64 << 10
_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_ENROLMENT = "/fleetdistill.wire.v1.EnrolmentService/"
_MAX_BYTES = {
    f"{_DEVICE}Upload": MAX_MESSAGE_BYTES,
    f"{_DEVICE}CheckIn": 2 * _USUAL_BYTES,  # a profile of 64 KiB and an identity
    f"{_ENROLMENT}Enrol": ENROLMENT_BYTES,
    f"{_ENROLMENT}Renew": ENROLMENT_BYTES,
}
# The intake rejects slightly larger chunks, with an error about chunks.
_CHUNK_MESSAGE_BYTES = CHUNK_BYTES + _USUAL_BYTES
_QUICK_SECONDS = 0.5


def max_bytes(method: str) -> int:
    """Returns the largest size in bytes of a method's first or only message."""
    return _MAX_BYTES.get(method, _USUAL_BYTES)


class Quota:
    """Slots for slow requests. Not thread-safe; belongs to one event loop.

    Args:
        most: Slots of all callers together, at least 1.
        max_per_caller: Slots of one caller, at least 1.
    """

    def __init__(self, most: int, max_per_caller: int) -> None:
        self._most, self._max_per_caller = most, max_per_caller
        self._slots: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)
        self.held = 0

    def take(self, caller: str, deadline: asyncio.Timeout) -> None:
        """Takes a slot; if none is free, an older request's deadline expires immediately."""
        if len(self._slots[caller]) >= self._max_per_caller:
            self._end_oldest(caller)
        elif self.held >= self._most:
            self._end_oldest(max(self._slots, key=lambda one: len(self._slots[one])))
        self._slots[caller][deadline] = None
        self.held += 1

    def give_back(self, caller: str, deadline: asyncio.Timeout) -> None:
        """Releases the request's slot, if it has one."""
        if deadline in self._slots.get(caller, ()):
            del self._slots[caller][deadline]
            self.held -= 1
            if not self._slots[caller]:
                del self._slots[caller]

    def _end_oldest(self, caller: str) -> None:
        oldest = next(iter(self._slots[caller]))
        self.give_back(caller, oldest)
        if not oldest.expired():  # an expired deadline cannot be rescheduled
            oldest.reschedule(asyncio.get_running_loop().time())


class Receiver:
    """Reads the requests of calls as bytes.

    Args:
        limits: Deadline of a request and the memory for slow requests.
    """

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.request_seconds
        most, max_per_caller = limits.request_bytes, limits.request_bytes_per_caller
        self.quota = Quota(max(most // MAX_MESSAGE_BYTES, 1), max(max_per_caller // MAX_MESSAGE_BYTES, 1))

    async def first(self, requests: AsyncIterator[bytes], method: str, caller: str) -> bytes:
        """Returns the first or only message of a call.

        Raises:
            RefusedError: The message is too large, missing, or incomplete at the deadline.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(until) as deadline:
                slot = loop.call_later(_QUICK_SECONDS, self.quota.take, caller, deadline)
                try:
                    message = await anext(requests)
                finally:
                    slot.cancel()
                    self.quota.give_back(caller, deadline)
        except StopAsyncIteration:
            raise RefusedError(Code.BAD_MESSAGE, f"the call of {method} ended without a request") from None
        except TimeoutError:
            raise self._too_slow(method, caller, early=loop.time() < until) from None
        return _check(message, max_bytes(method), method)

    async def all(self, requests: AsyncIterator[bytes], method: str, caller: str) -> AsyncIterator[bytes]:
        """Yields every message of a stream. The caller enforces deadlines for all but the first.

        Raises:
            RefusedError: The first message is invalid, as in `first`, or a later message is too large.
        """
        yield await self.first(requests, method, caller)
        async for message in requests:
            yield _check(message, min(max_bytes(method), _CHUNK_MESSAGE_BYTES), method)

    def _too_slow(self, method: str, caller: str, *, early: bool) -> RefusedError:
        if early:
            return too_many(("", caller), f"and other callers send too many slow requests, such as {method}", 5.0)
        text = f"the request of {method} was not complete within {self._seconds:g} s; send it again"
        return RefusedError(Code.INCOMPLETE, text)


def _check(message: bytes, most: int, method: str) -> bytes:
    if len(message) > most:
        raise RefusedError(Code.TOO_LARGE, f"a request of {method} has {len(message)} bytes; the limit is {most}")
    return message
