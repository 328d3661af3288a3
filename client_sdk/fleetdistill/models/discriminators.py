"""DaFKD's classifier with a discriminator that shares the classifier's layers or is a separate network.

A device trains both networks; the server loads those of the devices in turn.
"""

from __future__ import annotations

import copy
from math import prod
from typing import cast

from torch import Tensor, nn

from fleetdistill.training.model import FeatureModel, SplitModel

__all__ = ["JudgedClassifier", "logits_of_features", "shared_features"]


class SharedHead(nn.Module):
    """A discriminator on the classifier's features: one linear layer with F + 1 parameters."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Returns logits `[batch]` of features `[batch, ...]`."""
        return cast(Tensor, self.linear(features.flatten(1))).squeeze(1)


class OwnNetwork(nn.Module):
    """A separate discriminator: a copy of all layers of the classifier but the last, and a linear layer."""

    def __init__(self, classifier: nn.Module, features: int) -> None:
        super().__init__()
        self.body = _without_last_layer(classifier)
        self.head = SharedHead(features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits `[batch]` of inputs `[batch, *input_shape]`."""
        return cast(Tensor, self.head(self.body(x)))


class JudgedClassifier(nn.Module):
    """A local model and its discriminator.

    A `SplitModel` is split before its last layer, any other model at its own cut.

    Args:
        classifier: The local model, used without a copy.
        feature_shape: Shape of one sample's features at the split, as `shared_features` returns them.
        sharing: Whether the discriminator uses the classifier's features; otherwise it is a separate network.
        feature_level: Whether generated samples are features instead of inputs.
    """

    def __init__(
        self, classifier: nn.Module, feature_shape: tuple[int, ...], *, sharing: bool, feature_level: bool
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.sharing, self.feature_level = sharing, feature_level
        size = prod(feature_shape)
        self.discriminator = SharedHead(size) if sharing else OwnNetwork(classifier, size)

    def features(self, x: Tensor) -> Tensor:
        """Returns the features at the split of inputs `[batch, *input_shape]`."""
        return shared_features(self.classifier, x)

    def classify(self, features: Tensor) -> Tensor:
        """Returns logits `[batch, classes]` of features at the split."""
        return logits_of_features(self.classifier, features)

    def realness(self, generated: Tensor) -> Tensor:
        """Returns the discriminator's logits `[batch]` of generated samples, inputs or features."""
        if self.sharing and not self.feature_level:
            return cast(Tensor, self.discriminator(self.features(generated)))
        return cast(Tensor, self.discriminator(generated))

    def classify_generated(self, generated: Tensor) -> Tensor:
        """Returns the classifier's logits `[batch, classes]` of generated samples, inputs or features."""
        return self.classify(generated if self.feature_level else self.features(generated))


def shared_features(classifier: nn.Module, x: Tensor) -> Tensor:
    """Returns a classifier's features at the split: the input of its last layer, or its features at its own cut."""
    if isinstance(classifier, SplitModel):
        return classifier.embedding(x)
    return cast(FeatureModel, classifier).features(x)


def logits_of_features(classifier: nn.Module, features: Tensor) -> Tensor:
    """Returns a classifier's logits `[batch, classes]` of features at the split; see `shared_features`."""
    if isinstance(classifier, SplitModel):
        return cast(Tensor, _last_layer(classifier)(features))
    return cast(FeatureModel, classifier).predict(features)


def _last_layer(model: SplitModel) -> nn.Module:
    last = model.stages[-1]
    while isinstance(last, nn.Sequential):
        last = last[-1]
    return last


def _without_last_layer(classifier: nn.Module) -> nn.Module:
    if not isinstance(classifier, SplitModel):
        return copy.deepcopy(cast(FeatureModel, classifier).extractor)
    body = copy.deepcopy(classifier.stages)
    parent = body
    while isinstance(parent[-1], nn.Sequential):
        parent = parent[-1]
    parent[-1] = nn.Identity()
    return body
