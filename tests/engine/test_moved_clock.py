"""Somebody sets the system's clock by an hour: no round waits for it, no device is taken for late or gone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from engine.fragile import Crash
from engine.moved_clock import MovedClock
from support.answering import AnsweringDevice

from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

HOUR, DEADLINE = 3600.0, 600.0
both_ways = pytest.mark.parametrize("by", [-HOUR, HOUR])


def config() -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 1, "quorum": 0.5, "deadline_seconds": DEADLINE},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": 1},
            "server": {"torch_device": "cpu"},
        }
    )


class Waits:
    """d0 answers; once only d1 is asked, the clock is set, and then time passes in steps of nine minutes."""

    def __init__(self, store: Store, clock: MovedClock, by: float, *, dies: bool = False) -> None:
        self._store, self._clock, self._by, self._dies = store, clock, by, dies
        self.api = DeviceApi(store, clock=lambda: clock.steady)
        self.devices = [AnsweringDevice(MemoryLink(self.api), RUN, f"d{number}") for number in range(2)]
        self.waited: list[float] = []
        self.told = 0.0

    async def wait(self, seconds: float = 0.0) -> None:
        assert len(self.waited) < 20, "the deadline of ten minutes never passes"
        opened = self._store.runs.open_round(RUN)
        self.devices[0].step()
        if opened is None:
            self.devices[1].step()
        elif self._store.asks.devices_with_open(RUN) == {"d1"}:
            self._hour_passes_or_time()

    def _hour_passes_or_time(self) -> None:
        if self._by:
            self._clock.set_system(self._by)
            self._by = 0.0
            ask = self.api.next_ask(self.devices[1].identity)
            assert ask is not None
            self.told = ask.ask.deadline_seconds
            if self._dies:
                raise Crash
            return
        self._clock.pass_time(540.0)
        self.waited.append(540.0)

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


@both_ways
def test_deadline_passes_on_time_though_clock_was_set(by: float) -> None:
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    waits = Waits(store, clock, by)
    asyncio.run(Engine(store, config(), waits).run())
    assert waits.waited == [540.0, 540.0], "ten minutes are over within the second nine"
    assert waits.told == pytest.approx(DEADLINE), "what the device is told"
    assert [(row.round, row.device) for row in store.history.events(RUN, "late")] == [(1, "d1")]
    assert store.runs.existing(RUN).status == "finished"
    store.close()


def test_clock_set_back_while_engine_was_away_costs_one_deadline() -> None:
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    waits = Waits(store, clock, -HOUR, dies=True)
    with suppress(Crash):
        asyncio.run(Engine(store, config(), waits).run())
    assert store.runs.open_round(RUN) is not None
    store.asks.clock = clock.clock()  # a new process
    asyncio.run(Engine(store, config(), waits).run())
    assert waits.waited == [540.0, 540.0]
    assert store.runs.existing(RUN).status == "finished"
    store.close()


@both_ways
def test_leases_do_not_follow_the_clock(by: float) -> None:
    store, clock = Store.in_memory(), MovedClock()
    waits = Waits(store, clock, by)
    with suppress(Crash):
        asyncio.run(Engine(store, config(), Waits(store, clock, by, dies=True)).run())
    api = waits.api
    api.sessions.adopt_present_devices()
    clock.set_system(by)
    api.sessions.end_leases()
    assert store.devices.present(RUN) == ["d0", "d1"]
    for _ in range(30):
        clock.pass_time(api.sessions.lease_seconds / 15)
        api.sessions.end_leases()
    assert store.devices.present(RUN) == []
    store.close()
