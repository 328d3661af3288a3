"""Server model for 8x8 digits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from fleetdistill.models.shapes import check_classes, check_shape

_WIDTH = 128


def digits_server(feature_shape: Sequence[int] = (8, 4, 4), classes: int = 10) -> nn.Sequential:
    """Builds a network with two hidden layers of 128 units on flattened features.

    Args:
        feature_shape: Shape of one sample's features.
        classes: Number of classes, at least 2.

    Returns:
        A model that maps features `[batch, *feature_shape]` to logits `[batch, classes]`.

    Raises:
        ConfigurationError: The shape or the number of classes is not valid.
    """
    features = prod(check_shape(feature_shape))
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, check_classes(classes)),
    )
