"""A waker that lets devices work while the engine waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.fragile import Fuse

from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.engine import Engine


@dataclass
class Drive:
    """A waker that lets one device take one step; `away` devices do nothing."""

    devices: list[Any]
    fuse: Fuse = field(default_factory=Fuse)
    away: set[int] = field(default_factory=set)
    waits: int = 0
    on_wait: Callable[[], None] = lambda: None

    async def wait(self, seconds: float = 0.0) -> None:
        self.fuse.touch()
        self.on_wait()
        turn = self.waits % len(self.devices)
        self.waits += 1
        if turn in self.away:
            await asyncio.sleep(0.01)
        else:
            self.devices[turn].step(0.0)

    def wake_other(self) -> None:
        self.fuse.touch()


def run_engine(store: Any, config: RunConfig, drive: Drive) -> None:
    asyncio.run(Engine(store, config, drive).run())
