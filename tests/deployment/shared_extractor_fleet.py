"""A fleet on a frozen extractor of a few MB, with and without PyTorch, and what its state directories take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.driving import DriveDevices
from support.open_device import open_device
from torch import Tensor, nn

from fleetdistill import Device
from fleetdistill.compute import light_worker
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

CLASSES, SHAPE, FEATURES, ROUNDS = 4, (3, 16, 16), 64, 2
DEVICES = {"given": 7, "downloaded": 8, "light": None}
"""Seeds of the weights with which each device's own network begins; the run's are of seed 7."""


def frozen_layers(input_shape: Sequence[int], seed: int | None = 7) -> nn.Module:
    """An extractor with random weights, of 2 MB, with batch norm as pretrained ones have it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        layers = [nn.Conv2d(3, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU()]
        layers += [nn.Conv2d(64, 512, 3, stride=2, bias=False), nn.BatchNorm2d(512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(512, FEATURES, 3), nn.Flatten()).eval()


WEIGHTS_BYTES = sum(tensor.nbytes for tensor in frozen_layers(SHAPE).state_dict().values())


class AppModel(nn.Module):
    """The extractor and one layer."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.extractor, self.predict = extractor, nn.Linear(FEATURES, CLASSES)

    def features(self, x: Tensor) -> Any:
        return self.extractor(x)

    def forward(self, x: Tensor) -> Any:
        return self.predict(self.features(x))


def bright_rows(seed: int, count: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Images whose label can be seen: a bright band for each class."""
    random = np.random.default_rng(seed)
    labels = random.choice(CLASSES, count)
    images = random.random((count, *SHAPE), dtype=np.float32) / 5
    for image, label in zip(images, labels, strict=True):
        image[:, 4 * label : 4 * label + 3] += 0.7
    return images, labels


def copies(directory: Path) -> float:
    """The size of a directory in copies of the extractor's weights; a file with several names counts once."""
    found = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({one.st_ino: one.st_size for one in found}.values()) / WEIGHTS_BYTES


class Fleet:
    """A run with a refined head of `ROUNDS` deliveries; the devices can be opened again after it.

    Attributes:
        copies: Copies of the weights in each state directory, by device and moment.
        first: Content of each device's `model.onnx` of version 1.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copies: dict[str, dict[str, float]] = {name: {} for name in DEVICES}
        self.first: dict[str, bytes] = {}
        self._store = Store.in_memory()
        self._link = MemoryLink(DeviceApi(self._store))
        self._devices: list[Device] = []

    def open(self, name: str, folder: Path | None = None) -> Device:
        rows = bright_rows(sorted(DEVICES).index(name))
        seed = DEVICES[name]
        own: dict[str, Any] = {"worker": light_worker(rows)}
        if seed is not None:
            own = {"model": AppModel(frozen_layers(SHAPE, seed)), "data": rows}
        return open_device(
            server=self._link,
            state_dir=(folder or self.folder) / name,
            device_id=name,
            allow=["class_statistics", "counts", "gradients"],
            **own,
        )

    def play(self) -> None:
        config = run_config(
            {
                "run": {"name": "frozen", "method": "classstats", "rounds": ROUNDS, "min_devices": len(DEVICES)},
                "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
                "model": {"extractor": f"{__name__}:frozen_layers"},
                "method": {"features": "model", "rows_per_direction": 2, "refine": "gradients"},
                "server": {"torch_device": "cpu"},
            }
        )
        with ExitStack() as stack:
            self._devices = [stack.enter_context(self.open(name)) for name in DEVICES]
            asyncio.run(Engine(self._store, config, DriveDevices(self._devices, self._note)).run())
            for device in self._devices:
                device.step(0.0)
            self._note()

    def _note(self) -> None:
        for device in self._devices:
            name = str(device.device_id)
            self.note(name, f"version {device.version}")
            if device.version == 1 and name not in self.first:
                device.step(0.0)
                self.first[name] = (self.folder / name / "model.onnx").read_bytes()
                if name != "light":  # else a second round has nothing to do
                    device.replace_data(bright_rows(10))
                    device.step(0.0)

    def note(self, name: str, moment: str) -> None:
        """Notes the most that a directory has at a moment."""
        self.copies[name][moment] = max(self.copies[name].get(moment, 0), copies(self.folder / name))

    def close(self) -> None:
        self._store.close()
