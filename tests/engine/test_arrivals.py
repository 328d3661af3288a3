"""Answers are verified and prepared as they arrive, while the engine waits for a device before them."""

from __future__ import annotations

import asyncio

import pytest
from support.answering import AnsweringDevice
from support.wire_samples import make_payload
from torch import Tensor

from fleetdistill.wire.codec import decode
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.arrivals import MAX_ROWS, Arrivals
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.methods.feddkc.refined import Refined
from fleetdistill_server.methods.feddkc.server import FedDKCServer
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store


class SlowFirst:
    """A waker that lets the devices answer from the last to the first."""

    def __init__(self, devices: list[AnsweringDevice]) -> None:
        self.devices = devices
        self.waits = 0

    async def wait(self, seconds: float = 0.0) -> None:
        self.waits += 1
        order = [device for device in reversed(self.devices) if device.contract is None] or list(reversed(self.devices))
        for device in order:
            before = len(device.receipts)
            device.step()
            if len(device.receipts) > before:
                return

    def wake_other(self) -> None:
        return


def config_of(devices: int) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 1, "min_devices": devices},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": 1, "refinement": "none"},
            "server": {"torch_device": "cpu"},
        }
    )


def test_answers_that_came_together_are_looked_up_once() -> None:
    asked = [
        Ask(run=RUN, round=1, step_number=1, device=name, step="train", expects={}, deadline_at=0.0, id=number)
        for number, name in enumerate("bcd")
    ]
    lookups, read = list[str](), list[str]()

    def answered_after(device: str) -> list[Ask]:
        lookups.append(device)
        return [ask for ask in asked if ask.device > device]

    def answer_to(ask: Ask) -> DeviceAnswer:
        read.append(ask.device)
        return DeviceAnswer(ask.device, 1, make_payload())

    arrivals = Arrivals(answered_after, answer_to, lambda answer: None)
    assert [arrivals.read_one(after) for after in ("", "b", "b")] == [True] * 3
    assert (lookups, read) == ([""], ["b", "c", "d"])
    assert not arrivals.read_one("b")
    assert arrivals.take(asked[2]) is not None
    assert read == ["b", "c", "d"], "it was read early"


@pytest.mark.parametrize(("count", "waiting"), [(5, 0), (MAX_ROWS + 6, 1)])
def test_all_others_are_prepared_before_first_device_answers(
    count: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more devices than the engine looks up at once, an answer may wait for one more arrival."""
    store = Store.in_memory()
    link = MemoryLink(DeviceApi(store))
    names = [f"d{number:02}" for number in range(count)]
    devices = [AnsweringDevice(link, RUN, name) for name in names]
    prepared: list[float] = []
    prepare = FedDKCServer.refine

    def noted(server: FedDKCServer, logits: Tensor) -> Refined:
        prepared.append(float(logits[0, 0]))
        assert len(store.asks.uploads(RUN)) - len(prepared) <= waiting
        return prepare(server, logits)

    monkeypatch.setattr(FedDKCServer, "refine", noted)
    asyncio.run(Engine(store, config_of(count), SlowFirst(devices)).run())
    sent = [decode(store.blobs.open(row.sha256))["knowledge"] for row in store.asks.uploads(RUN)]
    assert sorted(prepared) == sorted(float(item.logits[0, 0]) for item in sent)  # type: ignore[attr-defined]
    assert [row.device for row in store.asks.uploads(RUN)] == list(reversed(names))
    assert all(row.status == "used" for row in store.asks.uploads(RUN))
