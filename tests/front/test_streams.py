"""Reading ahead of the worker: nothing lost, in order, and never more than the bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

import pytest

from fleetdistill_server.front.streams import BATCH, in_batches


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


async def turns(count: int = 50) -> None:
    """Lets the others do what they can without new input."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [0, 1, BATCH, 10 * BATCH + 1])
def test_everything_comes_once_and_in_order(count: int) -> None:
    async def work() -> None:
        found: list[int] = []
        async for batch in in_batches(Source(count).messages()):
            assert 1 <= len(batch) <= BATCH + 1
            found += batch
        assert found == list(range(count))

    run(work())


def test_it_reads_on_while_its_user_works_but_only_so_far() -> None:
    async def work() -> None:
        source = Source(100 * BATCH)
        async with contextlib.aclosing(in_batches(source.messages())) as batches:
            first = await anext(batches)
            await turns()
            assert len(first) < source.given <= len(first) + BATCH + 1
            second = await anext(batches)
            assert len(second) == BATCH

    run(work())


def test_a_message_is_given_at_once_although_no_other_follows() -> None:
    async def stalled() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def work() -> None:
        async with contextlib.aclosing(in_batches(stalled())) as batches:
            assert await anext(batches) == [1]

    run(work())


def test_what_came_before_an_error_is_given_first() -> None:
    found: list[int] = []

    async def work() -> None:
        async for batch in in_batches(Source(3, ConnectionError("gone")).messages()):
            found.extend(batch)

    with pytest.raises(ConnectionError, match="gone"):
        run(work())
    assert found == [0, 1, 2]


def test_who_stops_early_leaves_no_reader_behind() -> None:
    async def work() -> None:
        source = Source(100 * BATCH)
        async with contextlib.aclosing(in_batches(source.messages())) as batches:
            await anext(batches)
        given = source.given
        await turns()
        assert source.given == given
        assert len(asyncio.all_tasks()) == 2  # this one and the one of wait_for

    run(work())
