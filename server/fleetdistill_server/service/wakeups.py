"""Wake-ups between the front and the engine: a byte in a pipe, no data.

The supervisor makes the pipes and hands their ends to each child it starts, so they outlive both. A lost wake-up
costs time, never correctness: whoever waits also looks by itself every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Ends:
    """What one process holds: reads here to be woken, writes there to wake the other. -1 for none."""

    read: int = -1
    write: int = -1

    def __str__(self) -> str:
        return f"{self.read},{self.write}"

    @classmethod
    def parse(cls, text: str) -> Ends:
        """Reads what `str` wrote."""
        read, write = text.split(",")
        return cls(int(read), int(write))


def make_pair() -> tuple[Ends, Ends]:
    """Makes the pipes for two processes that wake each other."""
    first_read, second_write = os.pipe()
    second_read, first_write = os.pipe()
    for end in (first_read, second_write, second_read, first_write):
        os.set_blocking(end, False)
    return Ends(first_read, first_write), Ends(second_read, second_write)


class Wakeups:
    """One process's side, for an asyncio program."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._woken = asyncio.Event()
        if ends.read >= 0:
            asyncio.get_running_loop().add_reader(ends.read, self._drain)

    def wake_other(self) -> None:
        """Wakes the other process. A full pipe means that a wake-up is already waiting there."""
        if self._ends.write >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._ends.write, b"x")

    async def wait(self, seconds: float = POLL_SECONDS) -> None:
        """Returns when woken, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            # Not wait_for: up to Python 3.11 it may lose a cancellation that comes together with a wake-up.
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._ends.read, 1 << 16):  # every writer is gone: the end would be readable for ever
                asyncio.get_running_loop().remove_reader(self._ends.read)
        self._woken.set()
