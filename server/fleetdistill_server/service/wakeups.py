"""Wake-ups between the fronts and the engines, without data: one byte in a pipe, or a notification of the database.

On one machine, the supervisor creates pipes and passes their ends to each child it starts, so the pipes outlive both.
Processes of several machines reach each other through PostgreSQL (`store/postgres_notices.py`). A lost wake-up costs
time but not correctness, because waiting processes also poll every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from fleetdistill_server.store.database import Database

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Ends:
    """The pipe ends of one process: it reads wake-ups from one and sends them to the others; -1 for no pipe."""

    read: int = -1
    writes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(str, self.all()))

    def all(self) -> tuple[int, ...]:
        """Returns all ends, the one to read from first."""
        return self.read, *self.writes

    @classmethod
    def parse(cls, text: str) -> Ends:
        """Returns the ends described by a string, the inverse of `str`."""
        read, *writes = map(int, text.split(","))
        return cls(read, tuple(writes))


def make_ends(engines: int = 1) -> tuple[Ends, list[Ends]]:
    """Creates the pipes of a front and of engines that wake each other; returns the front's ends and the engines'."""
    front_read, front_write = os.pipe()
    pipes = [os.pipe() for _ in range(engines)]
    for end in (front_read, front_write, *(end for pipe in pipes for end in pipe)):
        os.set_blocking(end, False)
    return Ends(front_read, tuple(write for _, write in pipes)), [Ends(read, (front_write,)) for read, _ in pipes]


class Waker(Protocol):
    """What an engine waits for, and wakes its front with: `Wakeups`, or a simulation's clock."""

    async def wait(self, seconds: float = ...) -> None:
        """Waits until the store may have changed, at most `seconds`."""

    def wake_other(self) -> None:
        """Wakes the front because the store has new asks."""


class Wakeups:
    """The wake-ups of one asyncio process.

    Args:
        ends: The process's ends of the pipes.
        database: Database of the store, whose notifications replace the pipes if it has any.
        role: What the process is, `front` or `engine`.
    """

    def __init__(self, ends: Ends, database: Database | None = None, role: str = "front") -> None:
        self._ends = ends
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        other = "engine" if role == "front" else "front"
        self._notices = database.notices(role, other, self._on_notice) if database is not None else None
        if ends.read >= 0:
            self._loop.add_reader(ends.read, self._drain)

    def wake_other(self) -> None:
        """Wakes the other process, or all of its role. If a pipe is full, a wake-up is already pending."""
        if self._notices is not None:
            self._notices.send()
        for end in self._ends.writes:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(end, b"x")

    async def wait(self, seconds: float = POLL_SECONDS) -> None:
        """Waits for a wake-up, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            # Up to Python 3.11, wait_for may lose a cancellation that coincides with a wake-up.
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    def close(self) -> None:
        """Ends the reception of notifications."""
        if self._notices is not None:
            self._notices.close()

    def _on_notice(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._woken.set)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._ends.read, 1 << 16):  # without writers the pipe would stay readable forever
                asyncio.get_running_loop().remove_reader(self._ends.read)
        self._woken.set()
