"""Five small models for 8x8 digits with different predictors and one extractor with 128 features per sample.

The demo and the tests use them as a fleet of different devices: a linear predictor, two fully connected and two
convolutional ones. They come from this project, not from a paper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import SplitModel, output_shape

DIGITS_SHAPE = (1, 8, 8)
_EXTRACTOR_WIDTH = 8


def digits_extractor(input_shape: Sequence[int] = DIGITS_SHAPE) -> nn.Sequential:
    """Builds the extractor of all digit models, which the server sends to every device.

    Args:
        input_shape: Channels, height and width of one image, height and width at least 2.

    Returns:
        `[batch, *input_shape]` to features `[batch, 8, height // 2, width // 2]`; 8x4x4 = 128 for 8x8 digits.

    Raises:
        ConfigurationError: `input_shape` is not the shape of an image.
    """
    channels, _, _ = check_image(input_shape, smallest=2)
    stem = nn.Sequential(
        nn.Conv2d(channels, _EXTRACTOR_WIDTH, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(_EXTRACTOR_WIDTH),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(OrderedDict(stem=stem))


def _on_extractor(extractor: nn.Sequential, **predictor: nn.Module) -> SplitModel:
    return SplitModel(OrderedDict(stem=extractor[0], **predictor), cut="stem")


def _mlp(input_shape: Sequence[int], classes: int, *widths: int) -> SplitModel:
    extractor = digits_extractor(input_shape)
    stages: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    inputs = prod(output_shape(extractor, input_shape))
    for index, width in enumerate(widths, start=1):
        stages[f"hidden{index}"] = nn.Sequential(nn.Linear(inputs, width), nn.ReLU())
        inputs = width
    return _on_extractor(extractor, **stages, head=nn.Linear(inputs, check_classes(classes)))


def _cnn(input_shape: Sequence[int], classes: int, *widths: int) -> SplitModel:
    extractor = digits_extractor(input_shape)
    stages: dict[str, nn.Module] = {}
    inputs = _EXTRACTOR_WIDTH
    for index, width in enumerate(widths, start=1):
        convolution = nn.Conv2d(inputs, width, kernel_size=3, padding=1, bias=False)
        stages[f"conv{index}"] = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())
        inputs = width
    stages["flatten"] = nn.Flatten()
    _, height, width = output_shape(extractor, input_shape)
    return _on_extractor(extractor, **stages, head=nn.Linear(inputs * height * width, check_classes(classes)))


def digits_linear(input_shape: Sequence[int] = DIGITS_SHAPE, classes: int = 10) -> SplitModel:
    """Builds extractor and one linear layer. All five models have `digits_extractor`'s arguments and `classes` >= 2."""
    return _mlp(input_shape, classes)


def digits_mlp_small(input_shape: Sequence[int] = DIGITS_SHAPE, classes: int = 10) -> SplitModel:
    """Builds extractor and a predictor with one hidden layer of 32."""
    return _mlp(input_shape, classes, 32)


def digits_mlp_large(input_shape: Sequence[int] = DIGITS_SHAPE, classes: int = 10) -> SplitModel:
    """Builds extractor and a predictor with two hidden layers of 128 and 64."""
    return _mlp(input_shape, classes, 128, 64)


def digits_cnn_small(input_shape: Sequence[int] = DIGITS_SHAPE, classes: int = 10) -> SplitModel:
    """Builds extractor and a predictor with one 3x3 convolution of width 8."""
    return _cnn(input_shape, classes, 8)


def digits_cnn_large(input_shape: Sequence[int] = DIGITS_SHAPE, classes: int = 10) -> SplitModel:
    """Builds extractor and a predictor with two 3x3 convolutions of widths 16 and 32."""
    return _cnn(input_shape, classes, 16, 32)
