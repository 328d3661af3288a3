"""Wake-ups between the front and the engine: one byte in a pipe, without data.

The supervisor creates the pipes and passes their ends to each child it starts, so the pipes outlive both. A lost
wake-up costs time but not correctness, because waiting processes also poll every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Ends:
    """The pipe ends of one process: it reads wake-ups from one and sends them to the other; -1 for no pipe."""

    read: int = -1
    write: int = -1

    def __str__(self) -> str:
        return f"{self.read},{self.write}"

    @classmethod
    def parse(cls, text: str) -> Ends:
        """Returns the ends described by a string, the inverse of `str`."""
        read, write = text.split(",")
        return cls(int(read), int(write))


def make_pair() -> tuple[Ends, Ends]:
    """Creates the pipes for two processes that wake each other."""
    first_read, second_write = os.pipe()
    second_read, first_write = os.pipe()
    for end in (first_read, second_write, second_read, first_write):
        os.set_blocking(end, False)
    return Ends(first_read, first_write), Ends(second_read, second_write)


class Wakeups:
    """The wake-ups of one asyncio process."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._woken = asyncio.Event()
        if ends.read >= 0:
            asyncio.get_running_loop().add_reader(ends.read, self._drain)

    def wake_other(self) -> None:
        """Wakes the other process. If the pipe is full, a wake-up is already pending."""
        if self._ends.write >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._ends.write, b"x")

    async def wait(self, seconds: float = POLL_SECONDS) -> None:
        """Waits for a wake-up, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            # Up to Python 3.11, wait_for may lose a cancellation that coincides with a wake-up.
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._ends.read, 1 << 16):  # without writers the pipe would stay readable forever
                asyncio.get_running_loop().remove_reader(self._ends.read)
        self._woken.set()
