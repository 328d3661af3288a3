"""A model that multiplies what two predictors say."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from fleetdistill.model import FeatureModel


class CombinedModel(nn.Module):
    """The product of two models' probabilities, of one pass through the first one's extractor.

    The logits are log p_first + log p_second, so that their softmax is the product, made to sum to 1 again.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        """Joins two local models whose extractors give the same; they are used, not copied."""
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch, classes]` of inputs `[batch, *input_shape]`."""
        first, second = cast(FeatureModel, self.first), cast(FeatureModel, self.second)
        features = first.features(x)
        return first.predict(features).log_softmax(dim=-1) + second.predict(features).log_softmax(dim=-1)
