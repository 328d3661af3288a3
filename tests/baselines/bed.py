"""Baselines' halves where every number can be worked out by hand, and on tiny networks.

The quadratic bed: device k has the loss (w - c_k)^2 / 2 of one weight w, which starts at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from methods.tiny_context import CLASSES, INPUTS, tiny_context
from torch import Tensor, nn

from fleetdistill.methods import config_class, device_class
from fleetdistill.methods.base import DeviceMethod, Local
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel, check_local_model, split_sequential
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import ServerMethod

CENTRES, SAMPLES = (0.0, 4.0), (1, 3)
HIDDEN = 8


class _OnInputs(nn.Module):
    """A model whose features are its inputs."""

    @property
    def extractor(self) -> nn.Module:
        return nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return x

    def predict(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)


class OneWeight(_OnInputs):
    """The weight w, at 0, or several."""

    def __init__(self, weights: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(weights))

    def predict(self, features: Tensor) -> Tensor:
        return torch.stack([self.w.expand(len(features)), -self.w.expand(len(features))], dim=1)


class SameLogits(_OnInputs):
    """Gives every row the same logits `[C]`."""

    def __init__(self, logits_c: Sequence[float]) -> None:
        super().__init__()
        self.logits_c = nn.Parameter(torch.tensor(logits_c))

    def predict(self, features: Tensor) -> Tensor:
        return self.logits_c.expand(len(features), -1)


def one_weight(input_shape: Sequence[int] = (1,), classes: int = 2) -> OneWeight:
    """Builds the quadratic bed's model."""
    return OneWeight()


def three_weights(input_shape: Sequence[int] = (1,), classes: int = 3) -> OneWeight:
    """Builds a model of three weights."""
    return OneWeight(3)


def tiny_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Two layers, without dropout and batch-norm."""
    body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU())
    return SplitModel({"body": body, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def norm_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """The same with batch-norm that no name tells of."""
    body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU())
    return SplitModel({"body": body, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def make_config(method: str, **settings: Any) -> Any:
    """Returns settings under which a round can be worked out: plain SGD on all rows, and nothing is clipped."""
    plain = {"learning_rate": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "batch_size": 64}
    return config_class(method).from_settings({"robust": "off", "local_epochs": 1, **plain, **settings})


def make_device(method: str, module: nn.Module, data: TensorData, classes: int = CLASSES, **settings: Any) -> Any:
    """Returns a device half over a model and rows."""
    local = Local(
        model=module,
        taps=check_local_model(module),
        data=data,
        classes=classes,
        torch_device=torch.device("cpu"),
    )
    return device_class(method)(make_config(method, **settings).for_classes(classes), local)


def make_server(
    method: str, model: str = "baselines.bed:tiny_model", proxy: TensorData | None = None, **settings: Any
) -> Any:
    """Returns a server half over a model of this file, and a proxy set."""
    classes, inputs = (2, 1) if model.endswith("one_weight") else (CLASSES, INPUTS)
    models = ModelSection(device=model, server=model)
    context = tiny_context(model, models=models, classes=classes, input_shape=(inputs,), proxy=proxy)
    return server_class(method)(make_config(method, **settings).for_classes(classes), context)


def identity_extractor(input_shape: Sequence[int]) -> nn.Module:
    """Builds an extractor whose features are its inputs."""
    return nn.Identity()


def linear_predictor(feature_shape: Sequence[int], classes: int) -> nn.Module:
    """Builds a predictor of one layer."""
    return nn.Linear(feature_shape[0], classes)


def make_feature_server(method: str, inputs: int = INPUTS, **settings: Any) -> Any:
    """Returns a server half of a method on features; these are the inputs, a vector of `inputs` numbers."""
    models = ModelSection(extractor="baselines.bed:identity_extractor", server="baselines.bed:linear_predictor")
    context = tiny_context("", models=models, input_shape=(inputs,))
    return server_class(method)(make_config(method, **settings).for_classes(CLASSES), context)


def make_rows(seed: int, rows: int = 20, classes: int = CLASSES) -> TensorData:
    """Returns rows whose classes can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) + seed) % classes
    return TensorData(torch.randn(rows, INPUTS, generator=generator) + labels[:, None], labels)


def make_fleet(
    method: str, model: str = "tiny_model", devices: int = 2, proxy: TensorData | None = None, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns a server half and devices with rows of their own."""
    server = make_server(method, f"baselines.bed:{model}", proxy, **settings)
    build = {"tiny_model": tiny_model, "norm_model": norm_model}[model]
    members = {}
    for number in range(devices):
        torch.manual_seed(number)
        members[f"d{number}"] = make_device(method, build(), make_rows(number), **settings)
    return server, members


def quadratic_fleet(
    method: str, patch: pytest.MonkeyPatch, centres: Sequence[float] = CENTRES, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns a server half and a device for each centre c_k; the cross-entropy is replaced by (w - c_k)^2 / 2."""
    patch.setattr(FedAvgDevice, "loss", lambda half, x, y: ((half.local.model.w - x) ** 2 / 2).mean())
    server = make_server(method, "baselines.bed:one_weight", **settings)
    members = {}
    for number, (centre, rows) in enumerate(zip(centres, SAMPLES, strict=True)):
        data = TensorData(torch.full((rows, 1), centre), torch.zeros(rows, dtype=torch.int64))
        members[f"d{number}"] = make_device(method, one_weight(), data, classes=2, **settings)
    return server, members


def weights_of(server: ServerMethod, members: Mapping[str, DeviceMethod]) -> list[float]:
    """Returns w of each device and of the server on the quadratic bed."""
    models = [*(member.local.model for member in members.values()), server.networks()["model"]]
    return [model.w.item() for model in models]  # type: ignore[operator]


def digits_network(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Builds the network that FedBN's authors train on 28x28 digits in three channels."""
    sizes, layers = (3, 64, 64, 128), list[nn.Module]()
    for number, (below, above) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Conv2d(below, above, 5, padding=2), nn.BatchNorm2d(above), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number < 2 else [nn.Flatten()]
    for below, above in ((6272, 2048), (2048, 512)):
        layers += [nn.Linear(below, above), nn.BatchNorm1d(above), nn.ReLU()]
    return split_sequential(nn.Sequential(*layers, nn.Linear(512, 10)), 4)


def letters_network(input_shape: Sequence[int], classes: int) -> SplitModel:
    """Builds the network that FedGEN's authors train on letters: two convolutions, and 32 inputs of the last layer."""
    layers = [nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    layers += [nn.Conv2d(6, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return split_sequential(nn.Sequential(*layers, nn.Linear(784, 32), nn.Linear(32, classes)), 7)
