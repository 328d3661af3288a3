"""A store with a run in the middle of its third round."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from support.parroting import ParrotDevice

from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

RUN = "recorded"
DEVICES = ("d0", "d1")


class PowerCut(BaseException):
    """Ends the run in mid-round."""


def recorded_config(directory: Path) -> RunConfig:
    """The run of these stores; `directory` is its store."""
    return run_config(
        {
            "run": {"name": RUN, "method": "fedavg", "rounds": 4, "seed": 5, "deadline_seconds": 1e9},
            "contract": {"classes": 3, "input_shape": [1, 8, 8]},
            "model": {"device": "digits_linear", "extractor": "digits_extractor", "server": "digits_linear"},
            "server": {"store": str(directory), "torch_device": "cpu"},
        }
    )


class _Driver:
    """Implements the engine's `Waker`: lets the devices answer in turn, and pulls the plug in the third round."""

    def __init__(self, store: Store, devices: list[ParrotDevice]) -> None:
        self._store, self._devices = store, devices

    async def wait(self, seconds: float = 0.0) -> None:
        for device in self._devices:
            device.step()
            opened = self._store.runs.open_round(RUN)
            if opened is not None and opened.number == 3 and len(self._store.asks.uploads(RUN)) == 5:
                raise PowerCut

    def wake_other(self) -> None:
        return


def make_store(directory: Path) -> None:
    """Writes two closed rounds, a third with one answer of two, a refusal and a lease that ended."""
    store = Store.open(directory)
    api = DeviceApi(store)
    devices = [ParrotDevice(MemoryLink(api), RUN, name) for name in DEVICES]
    engine = Engine(store, recorded_config(directory), _Driver(store, devices))
    with contextlib.suppress(PowerCut):
        asyncio.run(engine.run())
    store.devices.register(RUN, "gone", b"h" * 32, b"")
    store.devices.mark_absent(RUN, "gone", "lease ended")
    store.history.add_event(RUN, "lease-ended", "gone was silent for 60 s", number=2, device="gone")
    store.history.add_event(RUN, "refused", "a sentence", number=2, device="d0", code="bad-value")
    store.close()
