"""FedDKC's device models: five ResNets of different depth with the same extractor.

They have basic blocks at widths 16 and 32, a 1x1 convolution with batch-norm on shortcuts that change the shape, no
bias before batch-norm, stride 2 in the first convolution of width 32, global average pooling and one linear layer. With
3 input channels and 10 classes the parameter counts, extractor included, are those of the paper's Table 3.

The paper's text describes max-pooling at the end of the extractor, but the operations and activation sizes in its Table
3 need features of 16x32x32 for 32x32 images. `max_pool=False` builds a network without pooling. The default follows the
text, which needs a quarter of the computation and of the upload.

References:
    Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, section 4.1,
    Table 3; He et al., Deep Residual Learning for Image Recognition (blocks and initialisation).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from fleetdistill.models.shapes import check_classes, check_image
from fleetdistill.training.model import SplitModel

CIFAR_SHAPE = (3, 32, 32)
_EXTRACTOR_WIDTH = 16
_BLOCK_WIDTHS = (16, 32)
EXPANSION = 4
"""Outputs of a bottleneck block for each unit of its width."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: `[b, inputs, h, w]` to `[b, width, ceil(h / stride), ceil(w / stride)]`."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = projection(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output; the class documents the shapes."""
        hidden = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut: `[b, inputs, h, w]` to `[b, 4 * width, h / stride, w / stride]`."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output; the class documents the shapes."""
        hidden = relu(self.norm1(self.conv1(x)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.norm3(self.conv3(hidden)) + self.shortcut(x))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Returns a residual block's shortcut: the identity if the shapes agree, else a 1x1 convolution with batch-norm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


def classifier(width: int, classes: int) -> nn.Sequential:
    """Returns average pooling and one linear layer, from `[b, width, h, w]` to logits `[b, classes]`."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def initialise_convolutions(model: nn.Module) -> None:
    """Draws new weights for all convolutions, normal with variance 2 / fan-out (He et al.)."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def resnet_extractor(input_shape: Sequence[int] = CIFAR_SHAPE, max_pool: bool = True) -> nn.Sequential:
    """Builds the extractor of all ResNets in the zoo, which the server sends to every device.

    Args:
        input_shape: Channels, height and width of one image.
        max_pool: Whether height and width are halved, as in the paper's text, or kept, as in its Table 3.

    Returns:
        `[batch, *input_shape]` to features `[batch, 16, ceil(height / 2), ceil(width / 2)]`.

    Raises:
        ConfigurationError: `input_shape` is not the shape of an image.
    """
    extractor = nn.Sequential(OrderedDict(stem=_stem(input_shape, max_pool)))
    initialise_convolutions(extractor)
    return extractor


def _stem(input_shape: Sequence[int], max_pool: bool) -> nn.Sequential:
    channels, _, _ = check_image(input_shape)
    return nn.Sequential(
        nn.Conv2d(channels, _EXTRACTOR_WIDTH, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(_EXTRACTOR_WIDTH),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if max_pool else nn.Identity(),
    )


def _resnet(blocks: tuple[int, int], input_shape: Sequence[int], classes: int, max_pool: bool) -> SplitModel:
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(input_shape, max_pool))
    inputs = _EXTRACTOR_WIDTH
    for width, count in zip(_BLOCK_WIDTHS, blocks, strict=True):
        for index in range(count):
            stride = 2 if index == 0 and width != _EXTRACTOR_WIDTH else 1
            stages[f"block{width}_{index + 1}"] = BasicBlock(inputs, width, stride)
            inputs = width
    stages["head"] = classifier(inputs, check_classes(classes))
    model = SplitModel(stages, cut="stem")
    initialise_convolutions(model)
    return model


def resnet2(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10, max_pool: bool = True) -> SplitModel:
    """Builds extractor and a linear classifier. Arguments: those of `resnet_extractor`, and `classes` >= 2."""
    return _resnet((0, 0), input_shape, classes, max_pool)


def resnet4(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10, max_pool: bool = True) -> SplitModel:
    """Builds extractor, one block of width 16 and a linear classifier."""
    return _resnet((1, 0), input_shape, classes, max_pool)


def resnet6(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10, max_pool: bool = True) -> SplitModel:
    """Builds extractor, one block each of width 16 and 32 and a linear classifier."""
    return _resnet((1, 1), input_shape, classes, max_pool)


def resnet10(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10, max_pool: bool = True) -> SplitModel:
    """Builds extractor, two blocks each of width 16 and 32 and a linear classifier."""
    return _resnet((2, 2), input_shape, classes, max_pool)


def resnet12(input_shape: Sequence[int] = CIFAR_SHAPE, classes: int = 10, max_pool: bool = True) -> SplitModel:
    """Builds extractor, two blocks of width 16, three of width 32 and a linear classifier."""
    return _resnet((2, 3), input_shape, classes, max_pool)
