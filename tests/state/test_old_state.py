"""State directories that earlier versions of the SDK wrote: today's goes on with them."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fleetdistill import COLUMNS, Device, Event, Step
from fleetdistill.knowledge import ModelParameters, ProxySet
from fleetdistill.link.downloads import Downloads, adopt_proxy_set
from fleetdistill.replacement import Replacement
from fleetdistill.state.directory import Storage
from fleetdistill.state.format import FORMAT
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import decode
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import build_method, make_contract  # type: ignore[attr-defined]
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

GOLDEN = Path(__file__).parent / "golden"
RUN = "recorded"
SECRET = b"\xab" * 32
DATA = (np.array([[0, 1], [1, 0], [2, 1], [1, 2]], np.float32), np.array([0, 1, 1, 0]))


def linear(input_shape: tuple[int, ...] = (2,), classes: int = 2) -> nn.Module:
    torch.manual_seed(11)
    return split_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 2)


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("state-*")))
def state_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a recorded directory."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "state"))


def test_what_is_in_it_is_read(state_dir: Path) -> None:
    storage = Storage(state_dir)
    assert storage.load_identity() == {"device": "d", "run": RUN, "secret": SECRET.hex()}
    pending = storage.outbox.pending()
    assert pending is not None
    assert (pending.name, pending.samples) == ((2, 1, 1), 4)
    assert pending.replacement == Replacement(True, 0.5, 0.5)
    assert pending.scores == {"test": [[0, 2], [0, 2]], "validation": [[0, 2], [0, 2]]}
    assert (storage.outbox.tries, storage.outbox.outcome(), storage.outbox.next_attempt(2, 1)) == (0, None, 1)
    with storage.outbox.answer() as payload:
        parameters = decode(payload)["parameters"]
    assert isinstance(parameters, ModelParameters)
    assert set(parameters.parameters) == {"stages.0.weight", "stages.0.bias", "stages.2.weight", "stages.2.bias"}
    storage.close()


def test_its_proxy_set_is_not_fetched_again(state_dir: Path) -> None:
    header = (state_dir / "proxy" / "header.bin").read_bytes()
    sha256 = header[-32:]
    adopt_proxy_set(state_dir)
    held = Downloads(state_dir / "downloads", 1 << 20).stored(sha256)
    assert held is not None
    (proxy,) = decode(held).values()
    assert isinstance(proxy, ProxySet)
    assert (proxy.name, proxy.licence, proxy.labels.tolist()) == ("two", "CC0-1.0", [0, 1])


def test_a_device_goes_on_with_it(state_dir: Path) -> None:
    """The answer in its outbox gets its receipt, its state is promoted, and the app hears of it."""
    candidate = (state_dir / "outbox" / "candidate.safetensors").read_bytes()
    store = _server(state_dir)
    events: list[Event] = []
    with Device(
        server=MemoryLink(DeviceApi(store)),
        model=linear,
        model_name="linear",
        data=DATA,
        state_dir=state_dir,
        allow=COLUMNS,
        export_onnx="never",
        on_event=events.append,
    ) as device:
        assert device.device_id == "d"
        assert device.step(0) is Step.ANSWERED
        assert device.model.state_dict().keys() == linear().state_dict().keys()
        assert device.step(0) is Step.WAITED
    assert [event.kind for event in events] == ["checked-in", "scored", "scored", "answered", "delivered"]
    (upload,) = store.asks.uploads(RUN)
    assert (upload["round"], upload["attempt"], upload["status"]) == (2, 1, "acknowledged")
    assert (state_dir / "state.safetensors").read_bytes() == candidate
    assert json.loads((state_dir / "device.json").read_text())["format"] == FORMAT
    store.close()


def _server(state_dir: Path) -> Store:
    """The server's side of the recording: the device is known, and asked round 2."""
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
    store.blobs.put(initial)  # type: ignore[arg-type]
    store.runs.publish_contract(RUN, contract.SerializeToString())
    profile = (state_dir / "profile.bin").read_bytes()
    assert store.devices.register(RUN, "d", hashlib.sha256(SECRET).digest(), profile)
    for _ in range(2):
        number = store.runs.start_round(RUN, ["d"])
        if number == 1:
            store.runs.close_short_round(RUN, number, "played before the recording")
    row = {"run": RUN, "round": 2, "step_number": 1, "device": "d", "step": "train", "seed": 5, "payload": None}
    row |= {"payload_bytes": 0, "deadline_at": time.time() + 60, "expects": {"parameters": "model_parameters"}}
    store.asks.write([row])
    return store
