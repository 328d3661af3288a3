"""Requests as they come in: no larger than their method takes, whole in good time, and out of one quota of memory.

gRPC keeps what has come of a request for as long as its call lives. So a request that takes longer than usual needs a
place, of which there are as many as the quota has memory for; where there is none left, whoever holds the most loses
its oldest one. Requests that come at once need none, and never wait.
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
"""Largest message of any call, the header of an upload: gRPC itself knows no bounds by method."""
ENROLMENT_BYTES = 16 << 10
"""Largest message of the enrolment port, where gRPC reads no larger ones."""
_USUAL_BYTES = 64 << 10
_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_ENROLMENT = "/fleetdistill.wire.v1.EnrolmentService/"
_MOST_BYTES = {
    f"{_DEVICE}Upload": MAX_MESSAGE_BYTES,
    f"{_DEVICE}CheckIn": 2 * _USUAL_BYTES,  # a profile of 64 KiB, and who sends it
    f"{_ENROLMENT}Enrol": ENROLMENT_BYTES,
    f"{_ENROLMENT}Renew": ENROLMENT_BYTES,
}
# A chunk that is a little too large is refused where chunks are checked, with a sentence about chunks.
_CHUNK_MESSAGE_BYTES = CHUNK_BYTES + _USUAL_BYTES
_QUICK_SECONDS = 0.5


def most_bytes(method: str) -> int:
    """Size of the largest first, or only, message that a method takes."""
    return _MOST_BYTES.get(method, _USUAL_BYTES)


class Quota:
    """Places for requests that are slow to come, of one event loop.

    Args:
        most: Places of all callers together, at least 1.
        most_of_one: Places of one caller, at least 1.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._places: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)
        self.held = 0

    def take(self, caller: str, deadline: asyncio.Timeout) -> None:
        """Takes a place; where there is none left, the deadline of an older request passes now."""
        if len(self._places[caller]) >= self._most_of_one:
            self._end_oldest(caller)
        elif self.held >= self._most:
            self._end_oldest(max(self._places, key=lambda one: len(self._places[one])))
        self._places[caller][deadline] = None
        self.held += 1

    def give_back(self, caller: str, deadline: asyncio.Timeout) -> None:
        """Gives a place back, of who has one."""
        if deadline in self._places.get(caller, ()):
            del self._places[caller][deadline]
            self.held -= 1
            if not self._places[caller]:
                del self._places[caller]

    def _end_oldest(self, caller: str) -> None:
        oldest = next(iter(self._places[caller]))
        self.give_back(caller, oldest)
        if not oldest.expired():  # one whose time is over just now is on its way out, and cannot be set again
            oldest.reschedule(asyncio.get_running_loop().time())


class Receiver:
    """Reads the requests of calls, as bytes.

    Args:
        limits: How long a request may take, and the memory for those that are slow.
    """

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.request_seconds
        most, most_of_one = limits.request_bytes, limits.request_bytes_per_caller
        self.quota = Quota(max(most // MAX_MESSAGE_BYTES, 1), max(most_of_one // MAX_MESSAGE_BYTES, 1))

    async def first(self, requests: AsyncIterator[bytes], method: str, caller: str) -> bytes:
        """The first, or only, message of a call.

        Raises:
            RefusedError: It is too large, there is none, or it was not whole in time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(until) as deadline:
                place = loop.call_later(_QUICK_SECONDS, self.quota.take, caller, deadline)
                try:
                    message = await anext(requests)
                finally:
                    place.cancel()
                    self.quota.give_back(caller, deadline)
        except StopAsyncIteration:
            raise RefusedError(Code.BAD_MESSAGE, f"the call of {method} ended without a request") from None
        except TimeoutError:
            raise self._too_slow(method, caller, early=loop.time() < until) from None
        return _checked(message, most_bytes(method), method)

    async def all(self, requests: AsyncIterator[bytes], method: str, caller: str) -> AsyncIterator[bytes]:
        """Every message of a stream; who reads them says how long the later ones may take.

        Raises:
            RefusedError: As `first` does; none of the later messages is too large either.
        """
        yield await self.first(requests, method, caller)
        async for message in requests:
            yield _checked(message, min(most_bytes(method), _CHUNK_MESSAGE_BYTES), method)

    def _too_slow(self, method: str, caller: str, *, early: bool) -> RefusedError:
        if early:
            return too_many(("", caller), f"and others send too many requests too slowly, such as {method}", 5.0)
        text = f"the request of {method} was not whole within {self._seconds:g} s; send it again"
        return RefusedError(Code.INCOMPLETE, text)


def _checked(message: bytes, most: int, method: str) -> bytes:
    if len(message) > most:
        raise RefusedError(Code.TOO_LARGE, f"a request of {method} has {len(message)} bytes, it takes at most {most}")
    return message
