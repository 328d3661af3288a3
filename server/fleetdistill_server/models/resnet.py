"""FedDKC's server predictor: a ResNet20 that reads features instead of images.

Bottleneck blocks (expansion 4) at widths 16, 32 and 64, 2, 3 and 1 of them: the only variant found that has the
167.31k parameters of the paper's Table 3. The paper gives neither the blocks nor the strides; we halve height and
width in the 3x3 convolution of the first block of widths 32 and 64, which fits the table's operations.

References:
    Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, Table 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from fleetdistill.models.resnet import classifier, initialise_convolutions, projection
from fleetdistill.models.shapes import checked_classes, checked_image

_WIDTHS = (16, 32, 64)
_BLOCKS = (2, 3, 1)
_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut: `[b, inputs, h, w]` to `[b, 4 * width, h / stride, w / stride]`."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block; shapes as in the class's description."""
        hidden = relu(self.norm1(self.conv1(x)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.norm3(self.conv3(hidden)) + self.shortcut(x))


def resnet20(feature_shape: Sequence[int] = (16, 16, 16), classes: int = 10) -> nn.Sequential:
    """Builds the server's ResNet20.

    Args:
        feature_shape: Channels, height and width of one sample's features.
        classes: Number of classes, at least 2.

    Returns:
        `[batch, *feature_shape]` to logits `[batch, classes]`.

    Raises:
        ConfigurationError: A shape or number that makes no model.
    """
    inputs, _, _ = checked_image(feature_shape)
    model = nn.Sequential()
    for width, count in zip(_WIDTHS, _BLOCKS, strict=True):
        for index in range(count):
            stride = 2 if index == 0 and width != _WIDTHS[0] else 1
            model.add_module(f"block{width}_{index + 1}", Bottleneck(inputs, width, stride))
            inputs = _EXPANSION * width
    model.add_module("head", classifier(inputs, checked_classes(classes)))
    initialise_convolutions(model)
    return model
