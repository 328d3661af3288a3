"""Streams of messages between the event loop and the pool: one reads or sends while the other works.

Without it every chunk would cross from one to the other and back before the next one is touched.
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
"""Most messages of one stream that are worked on at once, and most that wait meanwhile."""


async def in_batches(messages: AsyncIterator[T]) -> AsyncGenerator[list[T], None]:
    """Gives what has come so far, 1 to `BATCH` messages, and reads on while its user works on them.

    Raises:
        Exception: What `messages` raises, after everything that came before it.
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
    """The first message and all that wait behind it, and how the stream ended, if it has."""
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
    """Gives the messages of a stream as long as `held` grows by `enough` bytes in each `seconds` of waiting for them.

    Only the sender's time counts, not the time that its messages are worked on.

    Raises:
        RefusedError: `incomplete`, when the sender is too slow.
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
    text = f"the stream brought {brought} bytes in {seconds:g} s, of {enough} that it has to"
    return RefusedError(Code.INCOMPLETE, f"{text}; what came is kept, go on from there")
