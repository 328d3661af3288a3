"""FedDKC's server model, a ResNet20 on features instead of images.

It has 2, 3 and 1 bottleneck blocks (expansion 4) of widths 16, 32 and 64, the only configuration that we found with the
167.31k parameters of the paper's Table 3. The paper specifies neither blocks nor strides. The 3x3 convolutions of the
first blocks of widths 32 and 64 halve height and width, which matches the table's number of operations.

References:
    Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, Table 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fleetdistill.models.resnet import EXPANSION, Bottleneck, classifier, initialise_convolutions
from fleetdistill.models.shapes import check_classes, check_image

_WIDTHS = (16, 32, 64)
_BLOCKS = (2, 3, 1)


def resnet20(feature_shape: Sequence[int] = (16, 16, 16), classes: int = 10) -> nn.Sequential:
    """Builds the server's ResNet20.

    Args:
        feature_shape: Channels, height and width of one sample's features.
        classes: Number of classes, at least 2.

    Returns:
        A model that maps features `[batch, *feature_shape]` to logits `[batch, classes]`.

    Raises:
        ConfigurationError: The shape or the number of classes is not valid.
    """
    inputs, _, _ = check_image(feature_shape)
    model = nn.Sequential()
    for width, count in zip(_WIDTHS, _BLOCKS, strict=True):
        for index in range(count):
            stride = 2 if index == 0 and width != _WIDTHS[0] else 1
            model.add_module(f"block{width}_{index + 1}", Bottleneck(inputs, width, stride))
            inputs = EXPANSION * width
    model.add_module("head", classifier(inputs, check_classes(classes)))
    initialise_convolutions(model)
    return model
