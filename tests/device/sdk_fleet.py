"""A run in memory, and devices of the SDK that take part in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.open_device import open_device
from torch import nn

from fleetdistill import Device
from fleetdistill.knowledge import RefinedKnowledge, SampleKnowledge
from fleetdistill.testing import EventLog, Fault, FaultyLink, refused
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import build_method, make_contract  # type: ignore[attr-defined]
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN = "sdk"

ALLOW = ("features", "logits", "labels", "metrics")


def tiny_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.ReLU())


def tiny_server(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(feature_shape[0], classes)


def tiny_model() -> nn.Module:
    torch.manual_seed(11)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 2)


def tiny_data(rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    return (rng.normal(size=(rows, 4)) + labels[:, None]).astype(np.float32), labels


class Fleet:
    """A store with a published run, and the asks that a test writes into it."""

    def __init__(self) -> None:
        self.store = Store.in_memory()
        self.config: RunConfig = run_config(
            {
                "run": {"name": RUN, "method": "feddkc"},
                "contract": {"classes": 3, "input_shape": [4]},
                "model": {"extractor": "device.sdk_fleet:tiny_extractor", "server": "device.sdk_fleet:tiny_server"},
            }
        )
        self.store.runs.begin(RUN, self.config.fixed_part())
        contract, initial, _ = make_contract(self.config, build_method(self.config))
        self.initial = decode(initial)["initial"]  # type: ignore[arg-type]
        self.store.blobs.put(initial)  # type: ignore[arg-type]
        self.store.runs.publish_contract(RUN, contract.SerializeToString())
        self.api = DeviceApi(self.store)
        self.round = 0

    def ask(self, device: str, knowledge: RefinedKnowledge | None = None, **changes: Any) -> None:
        """Opens a round with one ask for one device."""
        self.round = self.store.runs.start_round(RUN, [device])
        payload = encode({"knowledge": knowledge or RefinedKnowledge(valid=False)}, np.float16)
        self.store.blobs.put(payload)
        row: dict[str, Any] = {
            "run": RUN,
            "round": self.round,
            "step_number": 1,
            "device": device,
            "step": "train",
            "seed": 5,
        }
        row |= {"payload": payload.sha256, "payload_bytes": payload.data_bytes, "deadline_at": time.time() + 60}
        self.store.asks.add([Ask(**{**row, "expects": {"knowledge": "sample_knowledge"}, **changes})])


def make_device(
    fleet: Fleet, state_dir: Path, events: EventLog | None = None, link: Any = None, **changes: Any
) -> Device:
    noted = EventLog() if events is None else events
    arguments: dict[str, Any] = {
        "server": link or MemoryLink(fleet.api),
        "model": tiny_model,
        "data": tiny_data(),
        "test_data": tiny_data(9, seed=1),
        "state_dir": state_dir,
        "device_id": "d",
        "allow": ALLOW,
        "export": "never",
        "on_event": noted.append,
    }
    return open_device(**{**arguments, **changes})


def knowledge_of(fleet: Fleet, number: int = -1) -> SampleKnowledge:
    upload = fleet.store.asks.uploads(RUN)[number]
    result = decode(fleet.store.blobs.open(upload.sha256))["knowledge"]
    assert isinstance(result, SampleKnowledge)
    return result


def weights(device: Device) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in device.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Crash(Exception):
    """Not one of ours, so nothing in the SDK catches it."""


def crashing_link(api: DeviceApi, moment: str) -> FaultyLink:
    """The process dies at a named moment of the first upload."""
    crash = {
        "before sending": Fault("upload", Crash()),
        "after the receipt was given": Fault("upload", Crash(), reply_only=True),
    }
    return FaultyLink(MemoryLink(api), *([crash[moment]] if moment in crash else []))


def stubborn_link(api: DeviceApi, code: str, times: int) -> FaultyLink:
    """The server refuses the first uploads with a code."""
    return FaultyLink(MemoryLink(api), *(refused("upload", code, nth) for nth in range(1, times + 1)))
