"""A thread reads a stream ahead: in order, bounded, with its errors, and never left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill.link.read_ahead import AHEAD, read_ahead


class Stream:
    """Numbers that are given as fast as they are taken, until the stream is cancelled."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.given = 0
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self._count = count
        self._error = error

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self._count):
                if self.cancelled.is_set():
                    raise ConnectionError("cancelled")
                self.given += 1
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.ended.set()


@pytest.mark.parametrize("count", [0, 1, 10 * AHEAD])
def test_everything_comes_once_and_in_order(count: int) -> None:
    stream = Stream(count)
    assert list(read_ahead(iter(stream), stream.cancel)) == list(range(count))
    assert not stream.cancelled.is_set()


def test_it_reads_ahead_but_only_so_far() -> None:
    stream = Stream(10 * AHEAD)
    messages = read_ahead(iter(stream), stream.cancel)
    assert next(messages) == 0
    wait_until(lambda: stream.given == AHEAD + 2, "reading ahead")  # one taken, one in the thread's hand
    assert list(messages) == list(range(1, 10 * AHEAD))


def test_an_error_comes_after_what_came_before_it() -> None:
    stream = Stream(3, ConnectionError("gone"))
    messages = read_ahead(iter(stream), stream.cancel)
    assert [next(messages) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConnectionError, match="gone"):
        next(messages)


def test_who_stops_early_cancels_the_stream_and_leaves_no_thread() -> None:
    before = threading.active_count()
    stream = Stream(10 * AHEAD)
    messages = read_ahead(iter(stream), stream.cancel)
    next(messages)
    messages.close()
    assert stream.ended.wait(PATIENCE_SECONDS)
    assert stream.cancelled.is_set()
    wait_until(lambda: threading.active_count() == before, "the end of the thread")
