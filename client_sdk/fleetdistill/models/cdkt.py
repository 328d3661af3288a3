"""CDKT-FL's convolutional networks; each large one has a small counterpart with the same embedding size F.

Each convolution has a ReLU and max-pooling. Dropout comes before the hidden layers, so that it does not affect the
embedding, the input of the last layer. The small networks have one convolution fewer and the same F. The paper does not
describe its small networks; their pooling is our choice.

References:
    Le et al., CDKT-FL: Cross-Device Knowledge Transfer using Proxy Dataset in Federated Learning, and its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import SplitModel, output_shape

_FASHION = (1, 28, 28)
_CIFAR = (3, 32, 32)
_DIGITS = (1, 8, 8)
_Layer = tuple[int, int, int]  # width, kernel, pooling


def cdkt_fmnist(input_shape: Sequence[int] = _FASHION, classes: int = 10) -> SplitModel:
    """Builds the paper's network for Fashion-MNIST: 5x5 convolutions of width 32 and 32, dropout 0.4, F = 512.

    Args:
        input_shape: Channels, height and width of one image.
        classes: Number of classes, at least 2.

    Raises:
        ConfigurationError: A shape or number does not fit the model.
    """
    return _network(input_shape, classes, [(32, 5, 2), (32, 5, 2)], hidden=(512,), dropout=0.4)


def cdkt_fmnist_small(input_shape: Sequence[int] = _FASHION, classes: int = 10) -> SplitModel:
    """Builds the small network for Fashion-MNIST: one 5x5 convolution of width 32, F = 512.

    Arguments and errors as `cdkt_fmnist`.
    """
    return _network(input_shape, classes, [(32, 5, 4)], hidden=(512,), dropout=0.4)


def cdkt_cifar(input_shape: Sequence[int] = _CIFAR, classes: int = 10) -> SplitModel:
    """Builds the paper's network for CIFAR: 3x3 convolutions of width 16, 32, 64, hidden 512, dropout 0.5, F = 64.

    Arguments and errors as `cdkt_fmnist`.
    """
    return _network(input_shape, classes, [(16, 3, 2), (32, 3, 2), (64, 3, 2)], hidden=(512, 64), dropout=0.5)


def cdkt_cifar_small(input_shape: Sequence[int] = _CIFAR, classes: int = 10) -> SplitModel:
    """Builds the small network for CIFAR: 3x3 convolutions of width 16 and 32, hidden 512, F = 64.

    Arguments and errors as `cdkt_fmnist`.
    """
    return _network(input_shape, classes, [(16, 3, 2), (32, 3, 4)], hidden=(512, 64), dropout=0.5)


def cdkt_digits(input_shape: Sequence[int] = _DIGITS, classes: int = 10) -> SplitModel:
    """Builds our network for 8x8 digits: 3x3 convolutions of width 16 and 32, F = 64, without dropout.

    Arguments and errors as `cdkt_fmnist`.
    """
    return _network(input_shape, classes, [(16, 3, 2), (32, 3, 2)], hidden=(64,))


def cdkt_digits_small(input_shape: Sequence[int] = _DIGITS, classes: int = 10) -> SplitModel:
    """Builds our small network for 8x8 digits: one 3x3 convolution of width 8, F = 64.

    Arguments and errors as `cdkt_fmnist`.
    """
    return _network(input_shape, classes, [(8, 3, 2)], hidden=(64,))


def _network(
    input_shape: Sequence[int], classes: int, layers: list[_Layer], *, hidden: Sequence[int], dropout: float = 0.0
) -> SplitModel:
    channels, _, _ = check_image(input_shape, smallest=prod(pool for _, _, pool in layers))
    stages: dict[str, nn.Module] = {}
    for number, (width, kernel, pool) in enumerate(layers, start=1):
        convolution = nn.Conv2d(channels, width, kernel, padding=kernel // 2)
        stages[f"conv{number}"] = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(pool))
        channels = width
    inputs = prod(output_shape(nn.Sequential(*stages.values()), input_shape))
    stages["flatten"] = nn.Sequential(nn.Flatten(), nn.Dropout(dropout))
    for number, width in enumerate(hidden, start=1):
        stages[f"hidden{number}"] = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        inputs = width
    stages["head"] = nn.Linear(inputs, check_classes(classes))
    return SplitModel(stages, cut="conv1")
