"""An event loop whose clock stands still while it works: to wait costs no time, and a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NobodyComes(selectors.SelectSelector):
    """Waits for nothing: where no file is ready, the time until the next timer has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        result = super().select(0)
        assert result or timeout is not None, "the loop waits for something that never comes"
        if not result:
            self.now += timeout or 0.0
        return result


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NobodyComes()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for what waits for timers only: no threads, no sockets."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
