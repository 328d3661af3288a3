"""DaFKD's two halves on small models, and rounds of them without a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.knowledge import (
    Parts,
)
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.device import DaFKDDevice
from fleetdistill.models import build_model
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.dafkd.server import DaFKDServer
from fleetdistill_server.testing import FakeCohort, play

CLASSES, SHAPE = 10, (1, 8, 8)

CPU = torch.device("cpu")

QUICK = {"local_epochs": 1, "kd_samples": 64, "kd_epochs": 1, "generator": "digits_generator", "kd_start_round": 1}

VARIANTS: dict[str, dict[str, Any]] = {
    "server": {},
    "no sharing": {"sharing": False},
    "no correlation": {"correlation": False},
    "logits": {"ensemble_space": "logits"},
    "lagged": {"discriminator_location": "device"},
    "exact": {"discriminator_location": "device", "sync": "exact"},
    "soft-only": {"discriminator_location": "device", "upload_model": False},
    "feature level": {"generator_level": "feature", "generator": "feature_generator"},
    "labels": {"label_condition": True},
    "penalty": {"gradient_penalty": 0.3},
    "paper": {"paper": True},
}


def config_of(**settings: Any) -> DaFKDConfig:
    return DaFKDConfig.from_settings({**QUICK, **settings}).for_classes(CLASSES)


def make_server(model: str = "digits_mlp_small", **settings: Any) -> DaFKDServer:
    context = MethodContext(
        classes=CLASSES, input_shape=SHAPE, models=ModelSection(device=model), torch_device=CPU, seed=3
    )
    return DaFKDServer(config_of(**settings), context)


def make_device(seed: int = 1, rows: int = 40, model: str = "digits_mlp_small", **settings: Any) -> DaFKDDevice:
    torch.manual_seed(seed)
    module = build_model(model)
    data = TensorData(torch.rand(rows, *SHAPE), (torch.arange(rows) * seed) % CLASSES)
    local = Local(model=module, taps=check_local_model(module), data=data, classes=CLASSES, torch_device=CPU)
    return DaFKDDevice(config_of(**settings), local)


def run_round(server: DaFKDServer, devices: Mapping[str, DaFKDDevice], completed: int = 0) -> FakeCohort:
    (cohort,) = play(server, devices, completed=completed)
    return cohort


def two_devices(**settings: Any) -> dict[str, DaFKDDevice]:
    return {"a": make_device(1, **settings), "b": make_device(3, rows=25, **settings)}


def states_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class OwnSplit(nn.Module):
    """A model that is no chain of stages but brings its taps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        self.top = nn.Linear(12, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.extractor(x)

    def predict(self, features: Tensor) -> Tensor:
        return self.top(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


def asked(server: DaFKDServer, device: DaFKDDevice) -> Parts:
    return server.message("a", FakeCohort({"a": device}), 5)


def train(server: DaFKDServer, device: DaFKDDevice, seed: int = 4) -> Parts:
    torch.manual_seed(seed)
    return device.handle(Ask(round=1, step="train", seed=seed, parts=asked(server, device))).parts
