"""`[run] min_round_seconds`: the least time between the starts of two rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine.moved_clock import MovedClock
from support.fleets import RUNS, prepare

from fleetdistill import Device
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store


class Turns:
    """The engine's waits, in which time passes and the devices work."""

    def __init__(self, clock: MovedClock, devices: Sequence[Device], most_waits: int) -> None:
        self._clock, self._devices, self._left = clock, devices, most_waits

    async def wait(self, seconds: float = 1.0) -> None:
        self._left -= 1
        if self._left < 0:
            raise TimeoutError
        self._clock.pass_time(seconds)
        for device in self._devices:
            device.step(0.0)

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


def starts(store: Store) -> list[float]:
    return [row.started_at for row in store.runs.rounds(RUN)]


@contextmanager
def fleet(work: Path, rounds: int) -> Iterator[tuple[Callable[[int], Engine], Store, MovedClock]]:
    """Makes engines that give up after so many waits, each over the same store and devices."""
    config, specs, _ = prepare(replace(RUNS["fedavg"], devices=2, rounds=rounds), work / "work")
    config = config.model_copy(update={"run": config.run.model_copy(update={"min_round_seconds": 3600.0})})
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    with ExitStack() as stack:
        stack.callback(store.close)
        link = MemoryLink(DeviceApi(store))
        devices = [stack.enter_context(make_device(spec, link)) for spec in specs]
        store.database.now = lambda: clock.system
        yield lambda most_waits: Engine(store, config, Turns(clock, devices, most_waits)), store, clock


def test_rounds_start_at_least_so_long_after_each_other(tmp_path: Path) -> None:
    with fleet(tmp_path, rounds=3) as (engine, store, _):
        asyncio.run(engine(10_000).run())
        first, second, third = starts(store)
        assert 3600 <= second - first < 3660
        assert 3600 <= third - second < 3660


def test_the_store_knows_until_when_a_run_waits(tmp_path: Path) -> None:
    with fleet(tmp_path, rounds=2) as (engine, store, _):
        with pytest.raises(TimeoutError):
            asyncio.run(engine(300).run())
        (first,) = starts(store)
        run = store.runs.existing(RUN)
        assert (run.waits_until, run.waits_for) == (first + 3600, None)
        store.run_control.end_wait(RUN)  # as a request to forget a device does
        with pytest.raises(TimeoutError):
            asyncio.run(engine(1).run())
        assert store.runs.existing(RUN).waits_until == first + 3600
        asyncio.run(engine(5000).run())
        assert store.runs.existing(RUN).waits_until is None


@pytest.mark.parametrize("set_by", [3000.0, -500_000.0], ids=["later", "set back"])
def test_an_engine_that_starts_again_waits_for_the_rest(set_by: float, tmp_path: Path) -> None:
    """And for `min_round_seconds` if somebody has set the system's clock back meanwhile."""
    with fleet(tmp_path, rounds=2) as (engine, store, clock):
        with pytest.raises(TimeoutError):
            asyncio.run(engine(300).run())
        clock.set_system(set_by)
        began = clock.system
        store.asks.clock = clock.clock()
        asyncio.run(engine(5000).run())
        first, second = starts(store)
        assert 0 <= second - ((first if set_by > 0 else began) + 3600) < 60
