"""Reads the messages of a download ahead in a thread: the next ones arrive while a chunk is checked and written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

AHEAD = 4
"""Largest number of messages that wait for their reader."""


@dataclass(frozen=True)
class _End:
    """The end of a stream, and its error."""

    error: BaseException | None


def read_ahead(stream: Iterator[T], cancel: Callable[[], object]) -> Generator[T, None, None]:
    """Yields the messages of a stream, which a thread reads; raises its errors.

    Args:
        stream: The stream. It must end after `cancel` has been called.
        cancel: Called if the caller stops before the end.
    """
    waiting: queue.Queue[T | _End] = queue.Queue(AHEAD)
    threading.Thread(target=_read, args=(stream, waiting), name="download", daemon=True).start()
    item: T | _End | None = None
    try:
        while not isinstance(item := waiting.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        if not isinstance(item, _End):
            cancel()
            while not isinstance(waiting.get(), _End):  # so that the thread can put the end
                pass


def _read(stream: Iterator[T], waiting: queue.Queue[T | _End]) -> None:
    try:
        for message in stream:
            waiting.put(message)
        waiting.put(_End(None))
    except BaseException as error:
        waiting.put(_End(error))
