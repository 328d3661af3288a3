"""The state directory as version 0.1.0 writes it: every SDK goes on with it.

`golden/state` is what a FedAvg device of a linear model leaves behind when it dies after one round, with the answer of
round 2 in its outbox. `python tests/state/test_old_state.py` records it; after a release it is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.open_device import open_device
from torch import nn

from fleetdistill import COLUMNS, Device, Event, Step
from fleetdistill.knowledge import ModelParameters
from fleetdistill.replacement import Replacement
from fleetdistill.state.directory import Storage
from fleetdistill.state.format import FORMAT
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import build_method, make_contract  # type: ignore[attr-defined]
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

GOLDEN = Path(__file__).parent / "golden" / "state"
RUN = "recorded"
SECRET = b"\xab" * 32
DATA = (np.array([[0, 1], [1, 0], [2, 1], [1, 2]], np.float32), np.array([0, 1, 1, 0]))


def linear(input_shape: tuple[int, ...] = (2,), classes: int = 2) -> nn.Module:
    torch.manual_seed(11)
    return split_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 2)


def server() -> tuple[Store, Payload]:
    """A store with the run, ready for check-ins, and the payload of its asks."""
    sys.modules["test_old_state"] = sys.modules[__name__]
    config = run_config(
        {
            "run": {"name": RUN, "method": "fedavg"},
            "contract": {"classes": 2, "input_shape": [2]},
            "model": {"device": "test_old_state:linear"},
        }
    )
    store = Store.in_memory()
    store.runs.begin(RUN, config.fixed_part())
    contract, initial, _ = make_contract(config, build_method(config))
    assert initial is not None
    (weights,) = decode(initial).values()
    payload = encode({"parameters": weights})
    for item in (initial, payload):
        store.blobs.put(item)
    store.runs.publish_contract(RUN, contract.SerializeToString())
    return store, payload


def ask(store: Store, payload: Payload) -> None:
    """Asks the device in a new round."""
    if (last := store.runs.open_round(RUN)) is not None:
        store.runs.close_short_round(RUN, last.number, "the next one begins")
    row: dict[str, Any] = {
        "run": RUN,
        "round": store.runs.start_round(RUN, ["d"]),
        "step_number": 1,
        "device": "d",
        "step": "train",
    }
    row |= {"seed": 5, "payload": payload.sha256, "payload_bytes": payload.data_bytes, "deadline_at": time.time() + 60}
    store.asks.add([Ask(**row | {"expects": {"parameters": "model_parameters"}})])


def device(link: MemoryLink, state_dir: Path, **settings: Any) -> Device:
    return open_device(
        server=link,
        model=linear,
        name="linear",
        data=DATA,
        state_dir=state_dir,
        allow=COLUMNS,
        export="never",
        **settings,
    )


class PowerCut(BaseException):
    """Ends the recording while the answer of round 2 is sent."""


def record(target: Path) -> None:
    """Plays a device until the cut, and copies its directory."""
    (store, payload), sent = server(), itertools.count(1)

    def hit(name: str) -> None:
        if name == "device.upload.before-send" and next(sent) == 2:
            raise PowerCut

    with tempfile.TemporaryDirectory() as work, mock.patch("fleetdistill.state.failpoints.hit", hit):
        more = {"run": RUN, "device_id": "d", "validation_data": DATA, "test_data": DATA}
        with contextlib.suppress(PowerCut), device(MemoryLink(DeviceApi(store)), Path(work), **more) as one:
            one.step(0)
            for _ in range(2):
                ask(store, payload)
                one.step(0)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(work, target, ignore=shutil.ignore_patterns("lock", "rows.txt"))
    with contextlib.closing(Storage(target)) as storage:
        storage.save_identity({"secret": SECRET.hex(), "data_key": SECRET.hex()})
    (target / "lock").unlink()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A copy of the recorded directory."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "state"))


def test_what_is_in_it_is_read(state_dir: Path) -> None:
    storage = Storage(state_dir)
    identity = storage.load_identity()
    assert (identity["device"], identity["run"], identity["secret"]) == ("d", RUN, SECRET.hex())
    pending = storage.outbox.pending()
    assert pending is not None
    assert (pending.name, pending.samples, pending.step) == ((2, 1, 1), 4, "train")
    assert pending.columns == {"parameters": ["parameters"], "metrics": ["metrics"]}
    assert pending.replacement == Replacement(True, 0.5, 0.5)
    splits = ("test/received", "validation/received", "test", "validation")
    assert pending.scores == {key: [[0, 1, 2], [1, 1, 2]] for key in splits}
    assert (storage.outbox.tries, storage.outbox.outcome(), storage.outbox.next_attempt(2, 1)) == (1, None, 1)
    with storage.outbox.answer() as payload:
        parameters = decode(payload)["parameters"]
    assert isinstance(parameters, ModelParameters)
    assert set(parameters.parameters) == {"stages.0.weight", "stages.0.bias", "stages.2.weight", "stages.2.bias"}
    storage.close()


def test_a_device_goes_on_with_it(state_dir: Path) -> None:
    """The answer in its outbox gets its receipt, its state is promoted, and the app hears of it."""
    candidate = (state_dir / "outbox" / "candidate.safetensors").read_bytes()
    store, payload = server()
    profile = (state_dir / "profile.bin").read_bytes()
    assert store.devices.register(RUN, "d", hashlib.sha256(SECRET).digest(), profile)
    ask(store, payload)
    ask(store, payload)
    events: list[Event] = []
    with device(MemoryLink(DeviceApi(store)), state_dir, on_event=events.append) as one:
        assert one.device_id == "d"
        assert one.step(0) is Step.ANSWERED
        assert one.model.state_dict().keys() == linear().state_dict().keys()
        assert one.step(0) is Step.WAITED
    assert [event.kind for event in events] == ["checked-in", *["scored"] * 4, "answered", "delivered"]
    (upload,) = store.asks.uploads(RUN)
    assert (upload.round, upload.attempt, upload.status) == (2, 1, "acknowledged")
    assert (state_dir / "state.safetensors").read_bytes() == candidate
    assert json.loads((state_dir / "device.json").read_text())["format"] == FORMAT
    store.close()


if __name__ == "__main__":
    record(GOLDEN)
