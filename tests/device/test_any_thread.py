"""Every public member of a device, from many threads at any moment: the outcome is the same as without them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS

from fleetdistill import COLUMNS, Device
from fleetdistill.compute import light_worker
from fleetdistill.errors import ConfigurationError, DeviceBusyError, ModelError, StateError
from fleetdistill.models import build_model
from fleetdistill.testing import EventLog
from fleetdistill_server.testing import MemoryServer

TURNS, THREADS = 1000, 4
NAMED: dict[str, type[Exception]] = {
    **dict.fromkeys(("run", "step", "tick", "start", "preview"), DeviceBusyError),
    **dict.fromkeys(("model", "predict"), ModelError),
    **dict.fromkeys(("roll_back", "roll_forward"), StateError),
    "background_result": ConfigurationError,
}
"""What a member may raise: another call works, or there is no model, no version or no thread yet."""
IMAGES = np.random.default_rng(7).random((20, 1, 8, 8), np.float32)
DATA = (IMAGES, np.arange(20) % 10)
SETTINGS: dict[str, dict[str, Any]] = {
    "torch": {
        "run": {"method": "fedavg", "rounds": 12},
        "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
    },
    "light": {
        "run": {"method": "classstats", "rounds": 3},
        "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
    },
}


def device_of(kind: str, link: Any, state_dir: Path, **changes: Any) -> Device:
    backend: dict[str, Any] = {"model": lambda: build_model("digits_linear"), "data": DATA}
    if kind == "light":
        backend = {"worker": light_worker(DATA)}
    return open_device(server=link, state_dir=state_dir, **{"allow": COLUMNS, **backend, **changes})


def members(device: Device, kind: str) -> dict[str, Callable[[], Any]]:
    """A call of each public member of `Device`."""
    return {
        "device_id": lambda: device.device_id,
        "state_dir": lambda: device.state_dir,
        "model": lambda: device.model,
        "models": lambda: dict(device.models),
        "predict": lambda: device.predict(IMAGES),
        "allow": lambda: setattr(device, "allow", device.allow),
        "ledger": lambda: device.ledger.entries,
        "replace_data": lambda: device.replace_data(*([] if kind == "light" else [DATA])),
        "run": device.run,
        "step": lambda: device.step(0),
        "tick": device.tick,
        "pause_seconds": lambda: device.pause_seconds,
        "start": device.start,
        "stop": device.stop,
        "wake": device.wake,
        "join": lambda: device.join(0.01),
        "preview": device.preview,
        "roll_back": device.roll_back,
        "roll_forward": device.roll_forward,
        "version": lambda: device.version,
        "background_result": device.background_result,
    }


ENDS = {"close", "forget"}
"""Members after which a device cannot be used; a thread calls one of them when the others are done."""


def test_no_public_member_is_left_out(tmp_path: Path) -> None:
    with MemoryServer(SETTINGS["light"]) as server, device_of("light", server.link(), tmp_path) as device:
        assert set(members(device, "light")) | ENDS == {name for name in dir(Device) if not name.startswith("_")}


@pytest.mark.long
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_thousand_calls_of_all_members_from_four_threads(kind: str, tmp_path: Path) -> None:
    """Devices are opened, called at random from all threads and closed by one of them, until the calls are made.

    A last device then ends the run alone: nothing that the others did may have spoilt it.
    """
    done: Counter[str] = Counter()
    counting = threading.Lock()
    events = EventLog()

    def call(device: Device, seed: int, left: int) -> None:
        chosen = random.Random(seed)
        calls = members(device, kind)
        for _ in range(left):
            name = chosen.choice(list(calls))
            try:
                calls[name]()
                result = name
            except NAMED.get(name, ()) as error:
                result = f"{name}: {type(error).__name__}"
            with counting:
                done[result] += 1

    with MemoryServer(SETTINGS[kind]) as server, ThreadPoolExecutor(THREADS) as threads:
        for opened in range(4):
            device = device_of(kind, server.link(), tmp_path / "state", on_event=events.append)
            called = [
                threads.submit(call, device, opened * THREADS + number, TURNS // 4 // THREADS + 1)
                for number in range(THREADS)
            ]
            for item in called:
                item.result(PATIENCE_SECONDS)
            threads.submit(device.close).result(PATIENCE_SECONDS)
            assert device.join(0)
        with device_of(kind, server.link(), tmp_path / "state", on_event=events.append) as device:
            device.run()
        assert server.status == "finished"
    assert sum(done.values()) >= TURNS
    assert {name.partition(":")[0] for name in done} == set(members(device, kind))
    assert "failed" not in events.kinds()
    receipts = [event.values["receipt"] for event in events if event.kind == "answered"]
    assert len(receipts) == len(set(receipts)), "each answer is reported once"
