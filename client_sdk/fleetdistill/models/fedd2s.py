"""FedD2S's layered models: every layer is a separate stage, so that the model can be cut after each layer.

A layer is a 3x3 convolution with ReLU and 2x2 max-pooling (C1, C2, ...) or a fully connected layer with ReLU (F1, F2,
..., the last one without ReLU). The widths are the paper's; kernels, padding and pooling are our choice.

References:
    Atapour et al., FedD2S: Personalized Data-Free Federated Knowledge Distillation, section IV-A.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import SplitModel

_CIFAR = (3, 32, 32)
_DIGITS = (1, 8, 8)


def fedd2s_m1(input_shape: Sequence[int] = _CIFAR, classes: int = 10) -> SplitModel:
    """Builds the paper's M1 for CIFAR-10 and CINIC-10: C1(8) C2(16) C3(32) F1(32) F2(16) F3(classes).

    Args:
        input_shape: Channels, height and width of one image, height and width at least 8.
        classes: Number of classes, at least 2.

    Raises:
        ConfigurationError: A shape or number does not fit the model.
    """
    return _layered(input_shape, classes, convolutions=(8, 16, 32), hidden=(32, 16))


def fedd2s_m2(input_shape: Sequence[int] = _CIFAR, classes: int = 100) -> SplitModel:
    """Builds the paper's M2 for FEMNIST and CIFAR-100: C1(16) C2(64) C3(128) F1(128) F2(32) F3(classes).

    Arguments and errors are those of `fedd2s_m1`.
    """
    return _layered(input_shape, classes, convolutions=(16, 64, 128), hidden=(128, 32))


def fedd2s_digits(input_shape: Sequence[int] = _DIGITS, classes: int = 10) -> SplitModel:
    """Builds our model for 8x8 digits: C1(8) C2(16) F1(64) F2(32) F3(classes).

    Arguments and errors are those of `fedd2s_m1`, but height and width must be at least 4.
    """
    return _layered(input_shape, classes, convolutions=(8, 16), hidden=(64, 32))


def _layered(
    input_shape: Sequence[int], classes: int, *, convolutions: Sequence[int], hidden: Sequence[int]
) -> SplitModel:
    inputs, height, width = check_image(input_shape, smallest=2 ** len(convolutions))
    stages: dict[str, nn.Module] = {}
    for number, outputs in enumerate(convolutions, start=1):
        stages[f"C{number}"] = _convolution(inputs, outputs)
        inputs, height, width = outputs, height // 2, width // 2
    inputs *= height * width
    for number, outputs in enumerate(hidden, start=1):
        flatten = [nn.Flatten()] if number == 1 else []
        stages[f"F{number}"] = nn.Sequential(*flatten, nn.Linear(inputs, outputs), nn.ReLU())
        inputs = outputs
    stages[f"F{len(hidden) + 1}"] = nn.Linear(inputs, check_classes(classes))
    model = SplitModel(stages, cut="C1")
    _initialise(model)
    return model


def _initialise(model: nn.Module) -> None:
    """Sets He's initial weights; with torch's defaults activations vanish over this many layers without batch-norm."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            assert part.bias is not None
            nn.init.zeros_(part.bias)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
