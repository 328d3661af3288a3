"""A run of five devices with secure sums, of which the first one fails: devices leave before they send their shares."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.driving import Drive, run_engine
from support.fleets import prepare

from fleetdistill import Device
from fleetdistill.methods.classstats_secure.exchange import INPUT, SHARES
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

__all__ = ["RUN", "make_summed_run"]

SETTINGS = Simulation(
    method="classstats_secure",
    settings={"epsilon": 20.0, "dimensions": 32, "min_in_sum": 4},
    devices=5,
    rounds=1,
    train_limit=600,
    test_limit=20,
    alpha=100.0,
    models=("digits_linear",),
    score="none",
    with_alone=False,
    with_fedavg=False,
)
LEAVE: Mapping[tuple[int, str], tuple[str, ...]] = {(1, SHARES): ("device-3", "device-4"), (2, INPUT): ("device-4",)}
"""Devices that leave when they are asked, by round and step."""


class Leaving:
    """A device that leaves in some rounds, and comes back for the next one."""

    def __init__(self, store: Store, spec: DeviceSpec, opened: ExitStack) -> None:
        self._store, self._spec, self._opened = store, spec, opened
        self._device: Device | None = None

    def step(self, wait_seconds: float) -> None:
        name = self._spec.name
        ask = self._store.asks.next_open(RUN, name)
        if ask is not None and name in LEAVE.get((ask.round, ask.step), ()):
            assert self._device is not None
            self._device.close()
            self._device = None
        elif self._device is None and self._store.runs.open_round(RUN) is None:
            self._device = self._opened.enter_context(make_device(self._spec, MemoryLink(DeviceApi(self._store))))
        if self._device is not None:
            self._device.step(wait_seconds)


def make_summed_run(work: Path) -> Path:
    """Runs it until its end, and returns the store's directory: a short round, and a sum of four devices."""
    config, specs, _ = prepare(SETTINGS, work / "fleet")
    directory = work / "store"
    store = Store.open(directory)
    with ExitStack() as opened:
        devices: list[Any] = [Leaving(store, spec, opened) for spec in specs]
        run_engine(store, config, Drive(devices))
    store.close()
    return directory
