"""A lane of messages: nothing lost, in order, and never more read ahead than the bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import PATIENCE_SECONDS

from fleetdistill_server.front.streams import AHEAD, Lane


class Source:
    """Gives numbers as fast as they are taken; knows how many were, and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.given = 0
        self.closed = False
        self._count = count
        self._error = error

    async def messages(self) -> AsyncIterator[int]:
        try:
            for number in range(self._count):
                self.given += 1
                yield number
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            await asyncio.sleep(0)
        finally:
            self.closed = True


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, 30)

    asyncio.run(limited())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def setting(event: threading.Event) -> Callable[[int], None]:
    """Work that sets an event."""
    return lambda message: event.set()


def ignore(message: int) -> None:
    """Work that does nothing."""


def nothing() -> None:
    """An end without work."""


async def turns(count: int = 50) -> None:
    """Lets the others do what they can without new input."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [0, 1, AHEAD, 10 * AHEAD + 1])
def test_everything_is_processed_once_and_in_order(pool: ThreadPoolExecutor, count: int) -> None:
    result: list[int] = []

    async def work() -> None:
        lane = Lane(pool, result.append, lambda: len(result))
        assert await lane.process(Source(count).messages()) == count, "the end comes last"

    run(work())
    assert result == list(range(count))


def test_stream_reads_ahead_while_processing_only_up_to_a_limit(pool: ThreadPoolExecutor) -> None:
    begun, go_on = threading.Event(), threading.Event()
    source = Source(100 * AHEAD)

    def wait(message: int) -> None:
        begun.set()
        go_on.wait(PATIENCE_SECONDS)

    async def work() -> None:
        task = asyncio.create_task(Lane(pool, wait, nothing).process(source.messages()))
        while not begun.is_set():
            await asyncio.sleep(0)
        await turns()
        assert 1 < source.given <= AHEAD + 2  # one in the thread, the waiting ones, one in the reader's hand
        go_on.set()
        await task

    run(work())
    assert source.given == 100 * AHEAD


def test_message_is_processed_at_once_even_if_none_follows(pool: ThreadPoolExecutor) -> None:
    done = threading.Event()

    async def stalled() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def work() -> None:
        task = asyncio.create_task(Lane(pool, setting(done), nothing).process(stalled()))
        while not done.is_set():
            await asyncio.sleep(0.001)
        task.cancel()

    run(work())


def test_what_came_before_an_error_is_processed_first(pool: ThreadPoolExecutor) -> None:
    result: list[int] = []

    async def work() -> None:
        await Lane(pool, result.append, nothing).process(Source(3, ConnectionError("gone")).messages())

    with pytest.raises(ConnectionError, match="gone"):
        run(work())
    assert result == [0, 1, 2]


def test_an_error_of_the_end_is_that_of_the_stream(pool: ThreadPoolExecutor) -> None:
    def fail() -> None:
        raise ValueError("incomplete")

    async def work() -> None:
        await Lane(pool, ignore, fail).process(Source(1).messages())

    with pytest.raises(ValueError, match="incomplete"):
        run(work())


def test_an_error_of_the_work_ends_a_stream_that_stalls(pool: ThreadPoolExecutor) -> None:
    seen: list[int] = []

    async def stalled() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.Event().wait()

    def fail(message: int) -> None:
        seen.append(message)
        raise ValueError("wrong")

    async def work() -> None:
        await Lane(pool, fail, nothing).process(stalled())

    with pytest.raises(ValueError, match="wrong"):
        run(work())
    assert seen == [1]


def test_a_fast_stream_does_not_keep_the_only_thread(pool: ThreadPoolExecutor) -> None:
    """The other stream's message is processed while the endless one goes on."""
    other = threading.Event()

    async def endless() -> AsyncIterator[int]:
        while not other.is_set():
            yield 0
            await asyncio.sleep(0)

    async def work() -> None:
        first = asyncio.create_task(Lane(pool, ignore, nothing).process(endless()))
        await turns()
        await Lane(pool, setting(other), nothing).process(Source(1).messages())
        await first

    run(work())


def test_a_cancelled_stream_leaves_no_reader_and_no_work_behind(pool: ThreadPoolExecutor) -> None:
    begun, go_on, result = threading.Event(), threading.Event(), list[int]()

    def wait(message: int) -> None:
        result.append(message)
        begun.set()
        go_on.wait(PATIENCE_SECONDS)

    async def work() -> None:
        source = Source(100 * AHEAD)
        task = asyncio.create_task(Lane(pool, wait, nothing).process(source.messages()))
        while not begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        given = source.given
        await turns()
        assert source.given == given
        assert len(asyncio.all_tasks()) == 2  # this one and the one of wait_for
        go_on.set()

    run(work())
    pool.shutdown()
    assert result == [0]
