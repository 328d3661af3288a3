"""One model of each form that an app may have, with its extractor and a server's predictor, for 3 classes."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_small, resnet18

from fleetdistill.training import split_sequential, wrap


class PlainNet(nn.Module):
    """Batch-norm, dropout and a residual connection, not in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(x))


class ProtocolNet(nn.Module):
    """Implements the protocol itself."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 64, 3)

    @property
    def extractor(self) -> nn.Module:
        return self.below

    def features(self, x: Tensor) -> Tensor:
        return self.below(x).relu()

    def predict(self, features: Tensor) -> Tensor:
        return self.above(features.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))


def by_name(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return split_sequential(_chain(), after="1")


def by_index(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return split_sequential(_chain(), after=2)


def wrapped(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return wrap(PlainNet(), cut="stem")


def own_protocol(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return ProtocolNet()


def torchvision_resnet(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return wrap(resnet18(num_classes=classes), cut="layer1.0.relu_1")


def torchvision_mobilenet(input_shape: tuple[int, ...] = (), classes: int = 3) -> nn.Module:
    return wrap(mobilenet_v3_small(num_classes=classes), cut="features.1")


MAKERS = {
    "by name": by_name,
    "by index": by_index,
    "wrapped": wrapped,
    "protocol": own_protocol,
    "torchvision resnet18": torchvision_resnet,
    "torchvision mobilenet": torchvision_mobilenet,
}


def _extractor(make: str) -> nn.Module:
    result = MAKERS[make]().extractor
    assert isinstance(result, nn.Module)
    return result


def by_name_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("by name")


def by_index_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("by index")


def wrapped_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("wrapped")


def own_protocol_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("protocol")


def torchvision_resnet_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("torchvision resnet18")


def torchvision_mobilenet_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return _extractor("torchvision mobilenet")


def predictor(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(feature_shape), classes))
