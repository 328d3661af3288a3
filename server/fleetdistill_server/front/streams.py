"""Batches of stream messages, so that the event loop reads while the thread pool processes.

Without batches, each chunk would have to be processed before the next chunk is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code

T = TypeVar("T")

BATCH = 4
"""Largest number of messages of one stream that are processed together; as many may be queued."""


async def in_batches(messages: AsyncIterator[T]) -> AsyncGenerator[list[T], None]:
    """Yields lists of 1 to `BATCH` messages and reads ahead while the caller processes them.

    Raises:
        Exception: Any error of `messages`, after the messages that preceded it.
    """
    waiting: asyncio.Queue[T | BaseException] = asyncio.Queue(BATCH)
    reader = asyncio.create_task(_read(messages, waiting))
    try:
        while True:
            batch, end = _taken(await waiting.get(), waiting)
            if batch:
                yield batch
            if isinstance(end, StopAsyncIteration):
                return
            if end is not None:
                raise end
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


async def _read(messages: AsyncIterator[T], waiting: asyncio.Queue[T | BaseException]) -> None:
    try:
        async for message in messages:
            await waiting.put(message)
        await waiting.put(StopAsyncIteration())
    except Exception as error:
        await waiting.put(error)


def _taken(first: T | BaseException, waiting: asyncio.Queue[T | BaseException]) -> tuple[list[T], BaseException | None]:
    """Returns the first message with all queued messages, and the error or end of the stream, if any."""
    batch: list[T] = []
    message = first
    while not isinstance(message, BaseException):
        batch.append(message)
        if waiting.empty():
            return batch, None
        message = waiting.get_nowait()
    return batch, message


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
