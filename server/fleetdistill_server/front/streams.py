"""Processes the messages of a stream in a thread pool, in order, while the event loop reads on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4
"""Largest number of messages of one stream that wait for a thread."""
_TURN = 16  # messages after which a thread serves another stream first


@dataclass(frozen=True)
class _End:
    """The end of a stream, and its error."""

    error: Exception | None


class Lane(Generic[T, R]):
    """Processes the messages of one stream, and then its end.

    A thread takes messages as long as there are any, so that a fast stream does not wait for the event loop between
    them. A stream without messages occupies no thread.

    Args:
        pool: Threads that process messages.
        work: Processes one message.
        end: Called after the last message of a stream without an error; its result is that of the stream.
    """

    def __init__(self, pool: ThreadPoolExecutor, work: Callable[[T], object], end: Callable[[], R]) -> None:
        self._pool = pool
        self._work = work
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[R] = self._loop.create_future()
        self._room = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: deque[T | _End] = deque()
        self._busy = self._closed = False

    async def process(self, messages: AsyncIterator[T]) -> R:
        """Reads and processes all messages; returns the result of `end`.

        Raises:
            Exception: An error of `work` or `end`, or of `messages` after the messages that preceded it.
        """
        reader = asyncio.create_task(self._read(messages))
        try:
            return await self._outcome
        finally:
            self._closed = True
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, messages: AsyncIterator[T]) -> None:
        try:
            async for message in messages:
                await self._put(message)
            await self._put(_End(None))
        except Exception as error:
            await self._put(_End(error))

    async def _put(self, item: T | _End) -> None:
        while len(self._waiting) >= AHEAD:
            self._room.clear()
            if len(self._waiting) >= AHEAD:  # a thread may have made room before the event was cleared
                await self._room.wait()
        with self._lock:
            self._waiting.append(item)
            idle, self._busy = not self._busy, True
        if idle:
            self._pool.submit(self._take_turn)

    def _take_turn(self) -> None:
        """Processes messages in a thread of the pool until none is left, or others have waited long enough."""
        try:
            for _ in range(_TURN):
                item = self._next()
                if item is None:
                    return
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    self._call(self._set_result, self._end())
                    return
                self._work(item)
            self._pool.submit(self._take_turn)
        except BaseException as error:
            self._call(self._set_error, error)

    def _next(self) -> T | _End | None:
        with self._lock:
            if self._closed or not self._waiting:
                self._busy = False
                return None
            was_full = len(self._waiting) >= AHEAD
            item = self._waiting.popleft()
        if was_full:
            self._call(self._room.set)
        return item

    def _set_result(self, result: R) -> None:
        if not self._outcome.done():  # else the call was cancelled
            self._outcome.set_result(result)

    def _set_error(self, error: BaseException) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed at shutdown
            self._loop.call_soon_threadsafe(function, *arguments)


async def with_progress_deadline(
    messages: AsyncIterator[T], seconds: float, held: Callable[[], int], enough: int
) -> AsyncIterator[T]:
    """Yields the messages of a stream while `held` grows by `enough` bytes per `seconds` of waiting.

    Time in which the messages are processed does not count.

    Raises:
        RefusedError: `incomplete`: the sender is too slow.
    """
    loop = asyncio.get_running_loop()
    iterator = aiter(messages)
    left, mark = seconds, held()
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(left):
                message = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _too_slow(held() - mark, enough, seconds) from None
        left -= loop.time() - began
        if held() - mark >= enough:
            left, mark = seconds, held()
        yield message


def _too_slow(brought: int, enough: int, seconds: float) -> RefusedError:
    text = f"the stream sent {brought} bytes in {seconds:g} s, but at least {enough} are required"
    return RefusedError(Code.INCOMPLETE, f"{text}; the bytes received are kept, resume the upload")
