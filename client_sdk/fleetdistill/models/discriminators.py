"""A classifier with a discriminator beside it, which shares its layers or is a network of its own.

Both halves of DaFKD use it: a device trains one, the server loads the devices' one after the other to hear them.
"""

from __future__ import annotations

import copy
from math import prod
from typing import cast

from torch import Tensor, nn

from fleetdistill.training.model import FeatureModel, SplitModel


class SharedHead(nn.Module):
    """A discriminator that reads the classifier's features: one linear layer, F + 1 numbers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch]` of features `[batch, ...]`."""
        return cast(Tensor, self.linear(features.flatten(1))).squeeze(1)


class OwnNetwork(nn.Module):
    """A discriminator with layers of its own: those of the classifier but the last, from its present weights on."""

    def __init__(self, classifier: nn.Module, features: int) -> None:
        super().__init__()
        self.body = _without_last_layer(classifier)
        self.head = SharedHead(features)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch]` of inputs `[batch, *input_shape]`."""
        return cast(Tensor, self.head(self.body(x)))


class JudgedClassifier(nn.Module):
    """A local model and its discriminator.

    The model is split before its last layer, where it is a chain of stages, else at its own cut.

    Args:
        classifier: The local model; used, not copied.
        feature_shape: Shape of one sample's features there, see `shared_shape`.
        sharing: The discriminator reads the classifier's features; otherwise it is a network of its own.
        feature_level: Generated samples are features instead of inputs.
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
        """What the last layer reads, of inputs."""
        return shared_features(self.classifier, x)

    def classify(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]` of `features`."""
        if isinstance(self.classifier, SplitModel):
            return cast(Tensor, _last_layer(self.classifier)(features))
        return cast(FeatureModel, self.classifier).predict(features)

    def realness(self, generated: Tensor) -> Tensor:
        """The discriminator's logits `[batch]` of generated samples, `[batch, *input_shape]` or features."""
        if self.sharing and not self.feature_level:
            return cast(Tensor, self.discriminator(self.features(generated)))
        return cast(Tensor, self.discriminator(generated))

    def classify_generated(self, generated: Tensor) -> Tensor:
        """The classifier's logits `[batch, classes]` of generated samples."""
        return self.classify(generated if self.feature_level else self.features(generated))


def shared_features(classifier: nn.Module, x: Tensor) -> Tensor:
    """What a discriminator shares of a classifier: the input of its last layer, or its features at its own cut."""
    if isinstance(classifier, SplitModel):
        return classifier.embedding(x)
    return cast(FeatureModel, classifier).features(x)


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
