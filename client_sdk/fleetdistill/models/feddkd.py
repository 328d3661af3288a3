"""FedDKD's networks: a convolutional one for FEMNIST, VGG-9 for CIFAR, and a large one for digits from five sources.

Widths are the paper's; kernels and paddings follow from its input sizes of the fully connected layers.

References:
    Li et al., FedDKD: Federated Learning with Decentralized Knowledge Distillation, section IV and appendix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import SplitModel, output_shape

_FEMNIST = (1, 28, 28)
_CIFAR = (3, 32, 32)
_DIGITS = (3, 28, 28)


def feddkd_femnist(input_shape: Sequence[int] = _FEMNIST, classes: int = 26) -> SplitModel:
    """Builds the network for FEMNIST: three 3x3 convolutions with 2x2 pooling, then a hidden layer of 512.

    The convolutions have width 32, 64 and 64, and the last one has no padding.

    Args:
        input_shape: Channels, height and width of one image, height and width at least 16.
        classes: Number of classes, at least 2.

    Raises:
        ConfigurationError: A shape or number does not fit the model.
    """
    channels, _, _ = check_image(input_shape, smallest=16)
    stages: dict[str, nn.Module] = {}
    for number, (width, padding) in enumerate(((32, 1), (64, 1), (64, 0)), start=1):
        convolution = nn.Conv2d(channels, width, kernel_size=3, padding=padding)
        stages[f"conv{number}"] = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2))
        channels = width
    stages["hidden"] = nn.Sequential(nn.Flatten(), nn.Linear(_numbers(stages, input_shape), 512), nn.ReLU())
    stages["head"] = nn.Linear(512, check_classes(classes))
    return SplitModel(stages, cut="conv1")


def feddkd_vgg9(input_shape: Sequence[int] = _CIFAR, classes: int = 10) -> SplitModel:
    """Builds VGG-9 without batch-norm: three pairs of 3x3 convolutions, then hidden layers of 512 and 512.

    The convolutions have width 32 and 64, 128 and 128, 256 and 256. Dropout is 0.05 (whole channels) after the
    second pair, 0.1 before the first and after the second hidden layer. Arguments and errors are those of
    `feddkd_femnist`, but height and width must be at least 8.
    """
    channels, _, _ = check_image(input_shape, smallest=8)
    stages: dict[str, nn.Module] = {}
    for number, (first, second) in enumerate(((32, 64), (128, 128), (256, 256)), start=1):
        dropout = [nn.Dropout2d(0.05)] if number == 2 else []
        stages[f"pair{number}"] = nn.Sequential(
            nn.Conv2d(channels, first, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(first, second, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *dropout,
        )
        channels = second
    flat = _numbers(stages, input_shape)
    stages["hidden1"] = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(flat, 512), nn.ReLU())
    stages["hidden2"] = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))
    stages["head"] = nn.Linear(512, check_classes(classes))
    return SplitModel(stages, cut="pair1")


def feddkd_five_digits(input_shape: Sequence[int] = _DIGITS, classes: int = 10) -> SplitModel:
    """Builds the network for digits from five sources: three 5x5 convolutions, then hidden layers of 2048 and 512.

    The convolutions have width 64, 64 and 128, and the first two have pooling. Every layer but the last has batch-norm,
    for FedDKD_BN. Arguments and errors are those of `feddkd_femnist`, but height and width must be at least 4.
    """
    channels, _, _ = check_image(input_shape, smallest=4)
    stages: dict[str, nn.Module] = {}
    for number, width in enumerate((64, 64, 128), start=1):
        pooling = [nn.MaxPool2d(2)] if number < 3 else []
        convolution = nn.Conv2d(channels, width, kernel_size=5, padding=2)
        stages[f"conv{number}"] = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), *pooling)
        channels = width
    inputs = _numbers(stages, input_shape)
    stages["flatten"] = nn.Flatten()
    for number, width in enumerate((2048, 512), start=1):
        stages[f"hidden{number}"] = nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU())
        inputs = width
    stages["head"] = nn.Linear(inputs, check_classes(classes))
    return SplitModel(stages, cut="conv1")


def _numbers(stages: dict[str, nn.Module], input_shape: Sequence[int]) -> int:
    """Returns the number of outputs of the stages for one image."""
    return prod(output_shape(nn.Sequential(OrderedDict(stages)), input_shape))
